"""Ranks that run collectives until one fails. These functions run in workers."""

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
MUCH = 25_000_000  # floats: more than the socket buffers of a process that does not read can hold
_LENGTHS = (1, 1000, 300_000)


@dataclass
class Ending:
    """The error that ended a rank's collectives, and its time by a clock that all processes of the machine share."""

    when: float
    error: Exception


def join(rank: int, size: int, seconds: float = 1800) -> None:
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    limit = timedelta(seconds=seconds)
    dist.init_process_group("farprop", init_method=address, rank=rank, world_size=size, timeout=limit)
    dist.barrier()


def run(kinds: list[str], seed: int) -> Ending:
    """Run collectives of these kinds until one fails. The seed decides their order, roots and lengths."""
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
    """Wait until this rank has done this many collectives."""
    with _change:
        _change.wait_for(lambda: _count >= count)


def once(kind: str, length: int = 3) -> Ending:
    """Run one collective, which must fail."""
    return _ending(lambda: KINDS[kind](torch.ones(length), 0))


def repeat(kind: str) -> Ending:
    """Run the same collective until it fails: a root does not wait for others, and may learn of a loss later."""

    def call() -> None:
        while True:
            KINDS[kind](torch.ones(3), 0)

    return _ending(call)


def receive(source: int) -> Ending:
    """Receive a message that never arrives."""

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
    """All-reduce in one of the groups that were made; return the error, or None if the result is right."""
    x = torch.ones(3)
    try:
        dist.all_reduce(x, group=_groups[group])
    except CollectiveError as error:
        return Ending(time.monotonic(), error)
    assert x.equal(torch.full((3,), float(_groups[group].size())))
    return None


def send_much(to: int) -> Ending:
    """Send a message that the other rank does not read."""
    return _ending(lambda: dist.send(torch.ones(MUCH), to))


def reduce_much() -> None:
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
