"""Farprop's DistributedDataParallel accepts the groups and works that torch's accepts, and calls them the same way."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from farprop.distributed import ProcessGroup
from farprop.errors import CollectiveError
from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.foreign_groups import GROUPS, WORKS, Foreign, GlooGroup, LateWork, Log
from tests.groups.kinds import default_group
from tests.support.workers import run_workers

# Torch's DistributedDataParallel imports it when it is made.
IMPORTED_IN_WORKERS = ("torch._dynamo",)


class Branches(nn.Module):
    """Has two dtypes, buffers, and a layer that can be left unused."""

    def __init__(self, has_unused: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2).double()
        self.never = nn.Linear(4, 4) if has_unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(self.norm(self.first(x)))).double()).pow(2)


def halved(group, bucket):  # no annotations: torch rejects those that are strings
    """A hook that reduces and returns another tensor."""
    half = bucket.buffer() / 2
    return dist.all_reduce(half, group=group, async_op=True).get_future().then(lambda done: done.value()[0])


HOOKS: dict[str, Callable[..., Any] | None] = {
    "no hook": None,
    "allreduce_hook": default_hooks.allreduce_hook,
    "fp16_compress_hook": default_hooks.fp16_compress_hook,
    "halved": halved,
}
GRAPHS: dict[str, dict[str, Any]] = {
    "all used": {},
    "find_unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


class Case(NamedTuple):
    views: bool
    init_sync: bool
    graph: str
    hook: str
    cap: float | None  # decides whether there are many buckets or few


CASES = [Case(*case) for case in itertools.product((False, True), (True, False), GRAPHS, HOOKS, (None, 0.00004))]


class Seen(NamedTuple):
    """The record of a run of a few iterations."""

    construction: Counter[str]
    iterations: list[Log]
    gradients: list[list[torch.Tensor | None]]
    buffers: list[torch.Tensor]


def train(ddp_class: type[nn.Module], group: Foreign, case: Case) -> Seen:
    model = Branches(has_unused=case.graph != "all used")
    ddp = ddp_class(
        model,
        process_group=group,
        gradient_as_bucket_view=case.views,
        init_sync=case.init_sync,
        bucket_cap_mb=case.cap,
        **GRAPHS[case.graph],
    )
    # The two classes compare parameters in different ways, so these sizes are not compared.
    construction: Counter[str] = Counter()
    for (name, _), times in group.log.items():
        construction[name] += times
    hook = HOOKS[case.hook]
    if hook is not None:
        ddp.register_comm_hook(group, hook)
    iterations, gradients = [], []
    for number in range(3):  # buckets are rebuilt before the second one, and before the third for a static graph
        group.log.clear()
        ddp.zero_grad(set_to_none=number == 1)
        torch.manual_seed(100 * number + dist.ProcessGroup.rank(group))
        loss = ddp(torch.randn(5, 3)).mean()
        loss.register_hook(lambda _: group.begin_backward())
        loss.backward()
        iterations.append(Counter(group.log))
        gradients.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    group.join()
    return Seen(construction, iterations, gradients, list(model.buffers()))


def compare(make: Callable[[], Foreign], case: Case) -> Foreign:
    theirs = train(TorchDDP, make(), case)
    group = make()
    ours = train(DistributedDataParallel, group, case)
    assert ours.construction == theirs.construction, case
    for number, (mine, right) in enumerate(zip(ours.iterations, theirs.iterations, strict=True)):
        assert mine == right, f"{case}, iteration {number}: {mine}, with torch {right}"
    for mine_of, right_of in zip(ours.gradients, theirs.gradients, strict=True):
        for mine, right in zip(mine_of, right_of, strict=True):
            assert (mine is None) == (right is None), case
            if mine is not None:
                torch.testing.assert_close(mine, right, rtol=1e-6, atol=1e-7)
    for mine, right in zip(ours.buffers, theirs.buffers, strict=True):
        assert mine.equal(right), case
    return group


def matrix(rank: int, size: int, group_kind: str, work_kind: str) -> None:
    with default_group("gloo", rank, size) as inner, warnings.catch_warnings():
        # Torch warns, for example, that static_graph makes find_unused_parameters unnecessary.
        warnings.simplefilter("ignore")
        orders = []
        # One rank runs all cases. Several ranks take longer, so each kind runs a part of them.
        mine = CASES if size == 1 else CASES[[*itertools.product(GROUPS, WORKS)].index((group_kind, work_kind)) :: 12]
        for case in mine:
            group = compare(lambda: GROUPS[group_kind](inner, work_kind), case)
            orders.append(group.finished)
        if work_kind == "late":
            assert any(order[:2] == [1, 0] for order in orders), "works never finished out of order"


@pytest.mark.parametrize(
    ("group_kind", "work_kind", "size"),
    [
        (group_kind, work_kind, size)
        for group_kind in GROUPS
        for work_kind in WORKS
        for size in (1, 2)
        if size == 1 or group_kind != "subset"  # it has a backend without ranks
    ],
)
def test_training_equals_torchs_class(group_kind, work_kind, size):
    # No check for leaks: torch's class keeps groups that are written in Python alive.
    run_workers(matrix, size, (size, group_kind, work_kind), timeout=100, check=False)


def left_to_gloo(rank: int, size: int) -> None:
    with default_group("gloo", rank, size) as inner:
        right = Branches(has_unused=False)
        right(torch.ones(2, 3)).mean().backward()
        for _ in range(100):
            model = Branches(has_unused=False)
            ddp = DistributedDataParallel(model, process_group=GlooGroup(inner, "subclass"))
            for _ in range(2):
                ddp.zero_grad()
                ddp(torch.ones(2, 3)).mean().backward()
            for mine, theirs in zip(model.parameters(), right.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_collectives_that_a_group_delegates_to_gloo():
    """Not compared with torch's class, which hangs once in some hundred iterations when Gloo's thread needs the GIL."""
    run_workers(left_to_gloo, 1, (1,), check=False)


# Faulty works


def failing(rank: int, size: int, work_kind: str) -> None:
    """Not compared with torch's class, which takes the exception in a future for its value and crashes."""
    with default_group("gloo", rank, size) as inner:
        cases = [("all used", 1), ("find_unused", 1), ("static", 1)]
        if work_kind != "wrapper":  # its wait does not raise
            cases.append(("find_unused", 3))
        for graph, fails in cases:
            group = GROUPS["direct"](inner, work_kind)
            model, right = (Branches(has_unused=graph != "all used") for _ in range(2))
            ddp = DistributedDataParallel(model, process_group=group, **GRAPHS[graph])
            group.fails = fails  # the buckets of two dtypes come first, then the counts of used parameters
            loss = ddp(torch.ones(2, 3)).mean()
            loss.register_hook(lambda _, group=group: group.begin_backward())
            with pytest.raises(ValueError, match="^the network is gone$"):
                loss.backward()
            group.join()
            ddp.zero_grad()
            ddp(torch.ones(2, 3)).mean().backward()  # the next iteration works
            right(torch.ones(2, 3)).mean().backward()
            for mine, theirs in zip(model.parameters(), right.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None)
                if mine.grad is not None:
                    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("work_kind", ["subclass", "wrapper", "late"])
def test_a_failed_work_raises(work_kind):
    run_workers(failing, 1, (1, work_kind), check=False)  # errors in futures keep the group alive


class Empty(ProcessGroup):
    """Its works have futures without a tensor."""

    def __init__(self, value: Any) -> None:
        super().__init__(0, 1)
        self._value = value

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Any:
        work = LateWork(self)
        work.finish(self._value)
        return work

    log: Log = Counter()


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "None"), ([], "a list of 0"), (True, "a bool"), ("all right", "a str")]
)
def test_a_future_without_a_tensor_raises(value, shown):
    ddp = DistributedDataParallel(nn.Linear(2, 2), process_group=Empty(value), init_sync=False)
    with pytest.raises(CollectiveError, match=f"has to have the reduced tensor.* but it has {shown}. Look at"):
        ddp(torch.ones(1, 2)).sum().backward()
