"""Ranks that run collectives until something goes wrong. These functions run in workers."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

import farprop.distributed  # noqa: F401 - it registers the backend
from farprop.errors import CollectiveError

_change = threading.Condition()
_count = 0


def _parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x) for _ in range(dist.get_world_size())]


def _exchange(x: torch.Tensor, root: int) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    sending = dist.isend(x, (rank + 1) % size)
    dist.recv(torch.empty_like(x), (rank - 1) % size)
    sending.wait()


KINDS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "all_reduce": lambda x, root: dist.all_reduce(x),
    "all_reduce, asynchronous": lambda x, root: dist.all_reduce(x, async_op=True).wait(),
    "broadcast": lambda x, root: dist.broadcast(x, root),
    "reduce": lambda x, root: dist.reduce(x, root),
    "all_gather": lambda x, root: dist.all_gather(_parts(x), x),
    "gather": lambda x, root: dist.gather(x, _parts(x) if dist.get_rank() == root else None, root),
    "scatter": lambda x, root: dist.scatter(x, _parts(x) if dist.get_rank() == root else None, root),
    "reduce_scatter": lambda x, root: dist.reduce_scatter(x, _parts(x)),
    "all_to_all": lambda x, root: dist.all_to_all(_parts(x), _parts(x)),
    "barrier": lambda x, root: dist.barrier(),
    "messages": _exchange,
}
_LENGTHS = (1, 1000, 300_000)


@dataclass
class Ending:
    """What ended it, and when: all processes of a machine have this clock in common."""

    when: float
    error: Exception


def join(rank: int, size: int) -> None:
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    limit = timedelta(minutes=30)
    dist.init_process_group("farprop", init_method=address, rank=rank, world_size=size, timeout=limit)
    dist.barrier()


def run(kinds: list[str], seed: int) -> Ending:
    """Collectives of these kinds in an order, with roots and lengths, that the seed decides."""
    global _count
    dice = random.Random(seed)
    try:
        while True:
            kind, root = KINDS[dice.choice(kinds)], dice.randrange(dist.get_world_size())
            kind(torch.ones(dice.choice(_LENGTHS)), root)
            with _change:
                _count += 1
                _change.notify_all()
    except CollectiveError as error:
        return Ending(time.monotonic(), error)


def await_collectives(count: int) -> None:
    """Return when this rank has done so many."""
    with _change:
        _change.wait_for(lambda: _count >= count)


def once(kind: str) -> Ending:
    """One collective that is to fail."""
    try:
        KINDS[kind](torch.ones(3), 0)
    except CollectiveError as error:
        return Ending(time.monotonic(), error)
    raise AssertionError(f"{kind} did not fail")


def leave() -> None:
    dist.destroy_process_group()
