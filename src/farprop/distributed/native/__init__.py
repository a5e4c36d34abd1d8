"""The backend ``farprop``: ``torch.distributed.init_process_group("farprop")``."""

import hashlib
from typing import Any

import torch.distributed as dist

from farprop.distributed.native.group import NativeProcessGroup

__all__ = ["NativeProcessGroup"]


def _create(options: Any, _: Any) -> NativeProcessGroup:
    # Each rank counts groups by itself to name them, so if halves of a job make groups of their own, those have the
    # same name. Their ranks tell them apart.
    members = hashlib.sha256(repr(list(options.global_ranks_in_group)).encode()).hexdigest()[:16]
    store = dist.PrefixStore(f"{members}/", options.store)
    return NativeProcessGroup(store, options.group_rank, options.group_size, options.timeout)


dist.Backend.register_backend("farprop", _create, extended_api=True, devices=["cpu"])
