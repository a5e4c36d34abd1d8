"""The backend ``farprop``: ``torch.distributed.init_process_group("farprop")``."""

import hashlib
from typing import Any

import torch.distributed as dist

from farprop.distributed.native.process_group import NativeProcessGroup

__all__ = ["NativeProcessGroup"]


def _create(options: Any, _: Any) -> NativeProcessGroup:
    # Torch names groups by counting them on each rank. So if two halves of a job make a group each, both groups have
    # the same name, and would meet under the same keys. A digest of the ranks tells them apart.
    members = hashlib.sha256(repr(list(options.global_ranks_in_group)).encode()).hexdigest()[:16]
    store = dist.PrefixStore(f"{members}/", options.store)
    return NativeProcessGroup(store, options.group_rank, options.group_size, options.timeout)


dist.Backend.register_backend("farprop", _create, extended_api=True, devices=["cpu"])
