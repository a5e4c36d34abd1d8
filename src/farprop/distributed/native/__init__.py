"""The backend ``farprop``: ``torch.distributed.init_process_group("farprop")``."""

import torch.distributed as dist

from farprop.distributed.native.group import NativeProcessGroup

__all__ = ["NativeProcessGroup"]

dist.Backend.register_backend("farprop", NativeProcessGroup, devices=["cpu"])
