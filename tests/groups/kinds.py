"""Groups to test with, by name: in worker processes, as the default group of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farprop.distributed import CountingProcessGroup, LonelyProcessGroup
from tests.groups.store_group import StoreGroup, ThreeGroup, job_store

KINDS = ("gloo", "messages", "three", "counting")


def _messages(store: Any, rank: int, size: int, timeout: Any) -> StoreGroup:
    return StoreGroup(store, rank, size)


def _three(store: Any, rank: int, size: int, timeout: Any) -> ThreeGroup:
    return ThreeGroup(_gloo(store, rank, size, timeout))


def _counting(store: Any, rank: int, size: int, timeout: Any) -> CountingProcessGroup:
    return CountingProcessGroup(_gloo(store, rank, size, timeout))


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    kind = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(torch.device("cpu"), kind, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=50)))
    group._set_default_backend(kind)
    return group


def _lonely(store: Any, rank: int, size: int, timeout: Any) -> LonelyProcessGroup:
    return LonelyProcessGroup(rank, size)


@contextmanager
def default_group(kind: str, rank: int, world_size: int) -> Iterator[dist.ProcessGroup]:
    """Make a group of this kind the default group of ``torch.distributed``."""
    makers = {"messages": _messages, "three": _three, "counting": _counting, "lonely": _lonely}
    if kind in makers and kind not in dist.Backend.backend_list:
        dist.Backend.register_backend(kind, makers[kind], devices=["cpu"])
    store = job_store(rank, world_size)
    dist.init_process_group(kind, store=store, rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD
        # The rank that hosts the store leaves last.
        if rank:
            store.set(f"left/{rank}", "")
        else:
            store.wait([f"left/{other}" for other in range(1, world_size)])
    finally:
        dist.destroy_process_group()


def finished_barrier() -> None:
    """A barrier that no rank is in any more when one returns from it: what fails next can't fail the barrier of a rank
    that hears of the failure before it has read the last message.
    """
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    store.set(f"finished/{dist.get_rank()}", "")
    store.wait([f"finished/{rank}" for rank in range(dist.get_world_size())])
