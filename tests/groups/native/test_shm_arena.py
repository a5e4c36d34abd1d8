"""No rank writes memory that another rank may read or write at the same time: each collective's use of the slots.

Steps are ordered by barriers; within a step, ranks are not ordered. So it is enough to record which rank touches which
bytes in which step, and that needs no second process.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import ReduceOp
from torch.utils._python_dispatch import TorchDispatchMode

from farprop.distributed.native import intra_node, shm_arena
from farprop.distributed.native.group_state import CollectiveCall, GroupState
from farprop.distributed.native.intra_node import IntraNode
from farprop.distributed.native.shm_arena import ShmArena, arena_bytes
from farprop.distributed.reduction import Reduction
from farprop.transport.shared_memory import SharedMapping

SLOT = 1024  # bytes; small, so that a few chunks are few elements


class Touch(NamedTuple):
    rank: int
    start: int
    end: int
    is_write: bool
    collective: str


class SingleRankArena(ShmArena):
    """Goes through its steps without waiting for other ranks."""

    def _step(self, call: CollectiveCall) -> None:
        self._steps += 1

    def _compare_fingerprints(self, call: CollectiveCall, slot: int) -> None:
        """There are no fingerprints of other ranks."""


class RecordTouches(TorchDispatchMode):
    """Records which bytes of the shared memory operators read and write."""

    def __init__(self, arena: SingleRankArena, memory: SharedMapping, touched: dict[int, list[Touch]]) -> None:
        super().__init__()
        self.arena, self.memory, self.touched = arena, memory, touched
        self.description = ""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not operator.is_view:
            schema = operator._schema.arguments
            named = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
            for argument, value in named:
                self._record(value, argument.alias_info is not None and argument.alias_info.is_write)
        return operator(*args, **kwargs)

    def _record(self, value: Any, is_write: bool) -> None:
        if isinstance(value, torch.Tensor) and value.numel():
            start = value.data_ptr() - self.memory.address
            if 0 <= start < self.memory.size:
                assert value.is_contiguous()
                touch = Touch(self.arena.local_rank, start, start + value.nbytes, is_write, self.description)
                self.touched[self.arena._steps].append(touch)


Act = Callable[[CollectiveCall], None]


def _collectives(local: IntraNode, plan: list[tuple[str, int, int]]) -> list[tuple[str, Act]]:
    total = Reduction(ReduceOp.SUM)

    def made(name: str, count: int, root: int) -> Act:
        x = torch.zeros(count)
        parts = [torch.zeros(count) for _ in range(local.size)]
        return {
            "barrier": lambda call: local.barrier(call),
            "allreduce": lambda call: local.allreduce(call, x, total),
            "reduce": lambda call: local.reduce(call, x, root, total),
            "broadcast": lambda call: local.broadcast(call, x, root),
            "scatter": lambda call: local.scatter(call, x, parts, root),
            "gather": lambda call: local.gather(call, parts if local.rank == root else [], x, root),
            "allgather": lambda call: local.allgather(call, parts, x),
            "reduce_scatter": lambda call: local.reduce_scatter(call, x, parts, total),
            "share": lambda call: local.share(call, [[part, x[:5]] for part in parts]),
        }[name]

    return [(f"{name} of {count}", made(name, count, root)) for name, count, root in plan]


NAMES = (
    "barrier", "allreduce", "allreduce", "reduce", "broadcast", "scatter", "gather", "allgather", "reduce_scatter",
    "share",
)  # fmt: skip


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_no_rank_touches_memory_that_another_is_writing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_arena, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(intra_node, "SLOT_BYTES", SLOT)
    monkeypatch.setattr(intra_node, "_ONE_SHOT_BYTES", SLOT // 4)
    monkeypatch.setattr(intra_node, "_CHAIN_BYTES", SLOT // 2)
    random.seed(size)
    chunk = SLOT // 4
    counts = [3, chunk // 2, chunk, chunk * (size - 1), chunk * size + 5, chunk * (3 * size + 2)]
    plan = [(random.choice(NAMES), random.choice(counts), random.randrange(size)) for _ in range(80)]
    plan += [("allreduce", count, 0) for count in counts for _ in range(2)]

    descriptor = os.memfd_create("slots")
    try:
        os.ftruncate(descriptor, arena_bytes(size))
        memory = SharedMapping(descriptor, arena_bytes(size))
    finally:
        os.close(descriptor)
    touched: dict[int, list[Touch]] = defaultdict(list)
    ends = set()
    for rank in range(size):
        state = GroupState(rank, size, lambda *_: None)
        arena = SingleRankArena(range(size), rank, memory, [0] * size, state)
        with RecordTouches(arena, memory, touched) as watching:
            for description, act in _collectives(IntraNode(arena), plan):
                watching.description = description
                act(CollectiveCall(0, description, 1.0, 1.0))
        ends.add(arena._steps)
    assert len(ends) == 1
    assert sum(touch.is_write for touches in touched.values() for touch in touches) > 100
    for step, touches in touched.items():
        for one in filter(lambda touch: touch.is_write, touches):
            for other in touches:
                is_apart = one.end <= other.start or other.end <= one.start
                assert one.rank == other.rank or is_apart, (step, one, other)
