"""The cases: calls and a backward pass between two workers, one call to many, and collectives of two hosts with two
ranks each.

The size of a collective is that of a rank's larger buffer: the output of a gather, the input of a scatter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.cases import Api, Sample
from bench.cases.autograd import one_hop
from bench.cases.calls import add_python, empty, identity
from bench.cases.one_to_many import BYTES, to_four
from bench.channel import Staged

KB, MB = 1 << 10, 1 << 20
RANKS = 4
HOSTS = 2
# All ranks have to know the moment before it comes, also over a link with a delay.
_LEAD_SECONDS = 0.005


@dataclass(frozen=True)
class Case:
    """One row of the table, or two: bulk is measured with and without TLS."""

    name: str
    label: str
    prepare: Callable[[Api, str], Sample]
    samples: int
    warmup: int
    ranks: int = 0
    """The size of the process group; 0 for workers."""
    workers: int = 2
    """How many workers; all but the first are on the other host."""
    crossing: int = 0
    """For bulk, the bytes that must cross the link one after the other."""


def echo(api: Api, peer: str) -> Sample:
    rpc_sync = api.rpc.rpc_sync
    x = torch.arange(10 * MB // 4, dtype=torch.float32)
    if not torch.equal(rpc_sync(peer, identity, args=(x,)), x):
        raise AssertionError(f"{api.package} gave back another tensor")
    return lambda: rpc_sync(peer, identity, args=(x,))


Group = dist.ProcessGroup | None
Operation = tuple[Callable[[], object], torch.Tensor, float]
"""What to run, and a tensor that has this value everywhere afterwards."""


def _all_reduce(count: int, group: Group, rank: int) -> Operation:
    x, y = torch.ones(count), torch.empty(count)

    def run() -> None:
        y.copy_(x)  # repeated sums would overflow
        dist.all_reduce(y, group=group)

    return run, y, RANKS


def _broadcast(count: int, group: Group, rank: int) -> Operation:
    x = torch.full((count,), 1.0 if rank == 0 else 0.0)
    return lambda: dist.broadcast(x, 0, group=group), x, 1


def _all_gather(count: int, group: Group, rank: int) -> Operation:
    x, y = torch.ones(count // RANKS), torch.empty(count)
    return lambda: dist.all_gather_single(y, x, group=group), y, 1


def _reduce_scatter(count: int, group: Group, rank: int) -> Operation:
    x, y = torch.ones(count), torch.empty(count // RANKS)
    return lambda: dist.reduce_scatter_single(y, x, group=group), y, RANKS


def _all_to_all(count: int, group: Group, rank: int) -> Operation:
    x, y = torch.ones(count), torch.empty(count)
    return lambda: dist.all_to_all_single(y, x, group=group), y, 1


def _gather(count: int, group: Group, rank: int) -> Operation:
    x, y = torch.ones(count // RANKS), torch.empty(count)
    parts = list(y.chunk(RANKS)) if rank == 0 else None
    return lambda: dist.gather(x, parts, 0, group=group), y if rank == 0 else x, 1


def _scatter(count: int, group: Group, rank: int) -> Operation:
    y = torch.empty(count // RANKS)
    parts = list(torch.ones(count).chunk(RANKS)) if rank == 0 else None
    return lambda: dist.scatter(y, parts, 0, group=group), y, 1


def _reduce(count: int, group: Group, rank: int) -> Operation:
    x, y = torch.ones(count), torch.empty(count)

    def run() -> None:
        y.copy_(x)
        dist.reduce(y, 0, group=group)

    # on the other ranks the tensor is undefined afterwards
    return run, y if rank == 0 else x, RANKS if rank == 0 else 1


# For each, which part of the size must cross the link in the busier direction.
COLLECTIVES: dict[str, tuple[Callable[[int, Group, int], Operation], float]] = {
    "all-reduce": (_all_reduce, 1),
    "broadcast": (_broadcast, 1),
    "all-gather": (_all_gather, 1 / HOSTS),
    "reduce-scatter": (_reduce_scatter, 1 / HOSTS),
    "all-to-all": (_all_to_all, 1),
    "gather": (_gather, 1 / HOSTS),
    "scatter": (_scatter, 1 / HOSTS),
    "reduce": (_reduce, 1),
}


def _collective(make: Callable[[int, Group, int], Operation], size: int) -> Callable[[Api, str], Sample]:
    def prepare(api: Api, _: str) -> Sample:
        group = api.group
        run, result, expected = make(size // 4, group, dist.get_rank())
        run()
        if not torch.equal(result, torch.full_like(result, expected)):
            raise AssertionError(f"{api.package} gave a wrong result")
        return Staged(before=lambda: _await_start(group), run=run)

    return prepare


def _await_start(group: Group) -> None:
    """Have all ranks begin at one moment of the clock, which the hosts share.

    Without it, a rank that only sends would run ahead. A barrier is not enough: ranks leave it one after another, in an
    order that depends on the backend.
    """
    latest = torch.tensor([time.monotonic()], dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
    time.sleep(max(0.0, latest.item() + _LEAD_SECONDS - time.monotonic()))


def _all_cases() -> list[Case]:
    calls = [
        Case("empty", "empty call", empty, samples=200, warmup=20),
        Case("add-python", "call of two 3x3 tensors", add_python, samples=200, warmup=20),
        Case("backward-1", "forward and backward, 1 hop", one_hop, samples=100, warmup=10),
        Case("echo-10mb", "echo 10 MB", echo, samples=2, warmup=1, crossing=2 * 10 * MB),
        Case("to-four-50mb", "50 MB to four workers", to_four, samples=2, warmup=1, workers=5, crossing=BYTES),
    ]
    small = [
        Case(f"{name}-4kb", f"{name} 4 KB", _collective(make, 4 * KB), samples=30, warmup=5, ranks=RANKS)
        for name, (make, _) in COLLECTIVES.items()
    ]
    size = 10 * MB
    bulk = [
        Case(
            f"{name}-10mb",
            f"{name} 10 MB",
            _collective(make, size),
            samples=2,
            warmup=1,
            ranks=RANKS,
            crossing=int(part * size),
        )
        for name, (make, part) in COLLECTIVES.items()
    ]
    return [*calls, *small, *bulk]


CASES = {case.name: case for case in _all_cases()}
