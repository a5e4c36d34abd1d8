"""``torch.compile`` around DistributedDataParallel, farprop's and torch's, on groups of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import farprop.distributed
from farprop.nn.parallel import DistributedDataParallel
from tests.groups.kinds import default_group
from tests.support.workers import run_workers

# The compiler.
IMPORTED_IN_WORKERS = ("torch._dynamo",)


class Layers(nn.Module):
    """Two layers of more than 1 MiB. It is a class of its own, because the compiler does not trace torch's modules."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(256, 512)
        self.norm = nn.BatchNorm1d(512)
        self.second = nn.Linear(512, 512)
        self.last = nn.Linear(512, 2)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.norm(self.first(x))))))


def batch(rank: int, number: int) -> torch.Tensor:
    torch.manual_seed(10 * number + rank)
    return torch.randn(6, 256, dtype=torch.float64)


def run(function: Callable[..., Any], size: int, *args: Any) -> list[Any]:
    """Run on ``size`` ranks without a check for leaks: torch's compiler keeps groups alive."""
    return run_workers(function, size, (size, *args), check=False)


class Graphs:
    """A backend of the compiler that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        self.count += 1
        return graph.forward


def train(rank: int, size: int, group_kind: str, ddp_class: type[nn.Module], how: str) -> int:
    graphs = Graphs()
    with default_group(group_kind, rank, size):
        ours, right = (ddp_class(Layers(), bucket_cap_mb=1) for _ in range(2))
        if how == "around":
            compiled = torch.compile(ours, backend=graphs)
        elif how == "inside":
            ours.module = torch.compile(ours.module, backend=graphs)
            compiled = ours
        else:
            compiled = torch.compile(lambda x: ours(x * 2) / 2, backend=graphs)
        for number in range(4):
            ours.zero_grad()
            right.zero_grad()
            compiled(batch(rank, number)).pow(2).mean().backward()
            (right(batch(rank, number) * 2) / 2 if how == "calls" else right(batch(rank, number))).pow(
                2
            ).mean().backward()
            for mine, theirs in zip(ours.parameters(), right.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad)
        for mine, theirs in zip(ours.buffers(), right.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs)
    return graphs.count


@pytest.mark.parametrize("how", ["around", "inside", "calls"])
@pytest.mark.parametrize(
    ("group_kind", "ddp_class"),
    [("gloo", DistributedDataParallel), ("farprop", DistributedDataParallel), ("farprop", TorchDDP)],
    ids=["farprop's on gloo", "farprop's on farprop", "torch's on farprop"],
)
def test_training(group_kind, ddp_class, how):
    counts = run(train, 2, group_kind, ddp_class, how)
    assert counts[0] == counts[1] >= 1


def test_graphs_are_split_where_buckets_end():
    """Otherwise all gradients would be ready at once, and no computation would overlap with the reduction."""
    ours = run(train, 2, "gloo", DistributedDataParallel, "around")
    theirs = run(train, 2, "gloo", TorchDDP, "around")
    assert ours == theirs
    assert ours[0] > 1


def small_buckets(rank: int, size: int) -> None:
    """The compiler can't split graphs by buckets of less than 1 MiB."""
    with default_group("gloo", rank, size):
        ddp = DistributedDataParallel(nn.Linear(3, 3), bucket_cap_mb=0.0001)
        torch.compile(ddp, backend="eager")(torch.ones(1, 3)).sum().backward()
        assert ddp.module.weight.grad.equal(torch.ones(3, 3))


def test_small_buckets():
    run(small_buckets, 1)


def in_compiled_code(rank: int, size: int) -> None:
    """Collectives of a group in Python, which are derived from messages."""
    with default_group("messages", rank, size):

        def total(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            dist.all_reduce(y)
            return y * 2

        compiled = torch.compile(total, backend="eager")
        for _ in range(2):
            assert compiled(torch.ones(3)).equal(torch.full((3,), 4.0 * size))


def test_collectives_in_compiled_code():
    run(in_compiled_code, 2)


assert farprop.distributed  # registers the backend
