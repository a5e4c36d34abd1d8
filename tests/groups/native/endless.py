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
_receiving = threading.Event()
_groups: list[dist.ProcessGroup] = []


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
MUCH = 25_000_000  # floats: more than a system holds for a process that does not read
_LENGTHS = (1, 1000, 300_000)


@dataclass
class Ending:
    """What ended it, and when: all processes of a machine have this clock in common."""

    when: float
    error: Exception


def join(rank: int, size: int, seconds: float = 1800) -> None:
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    limit = timedelta(seconds=seconds)
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


def once(kind: str, length: int = 3) -> Ending:
    """One collective that is to fail."""
    return _ending(lambda: KINDS[kind](torch.ones(length), 0))


def receive(source: int) -> Ending:
    """A message that is not to come."""

    def wait() -> None:
        work = dist.irecv(torch.ones(3), source)
        _receiving.set()
        work.wait()

    return _ending(wait)


def await_receiving() -> None:
    _receiving.wait()


def make_groups(members: list[list[int]]) -> None:
    _groups.extend(dist.new_group(ranks) for ranks in members)


def reduce_in(group: int) -> Ending | None:
    """An all-reduce in one of these groups: what ended it, or None if it is right."""
    x = torch.ones(3)
    try:
        dist.all_reduce(x, group=_groups[group])
    except CollectiveError as error:
        return Ending(time.monotonic(), error)
    assert x.equal(torch.full((3,), float(_groups[group].size())))
    return None


def send_much(to: int) -> Ending:
    """A message that is not taken."""
    return _ending(lambda: dist.send(torch.ones(MUCH), to))


def much() -> None:
    x = torch.ones(MUCH)
    dist.all_reduce(x)
    assert x.equal(torch.full_like(x, float(dist.get_world_size())))


def _ending(call: Callable[[], object]) -> Ending:
    try:
        call()
    except CollectiveError as error:
        return Ending(time.monotonic(), error)
    raise AssertionError("it did not fail")


def leave() -> None:
    _groups.clear()
    dist.destroy_process_group()
