"""DistributedDataParallel on several ranks computes what one process computes with the whole batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from farprop.distributed import LonelyProcessGroup
from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Mixed, Net, Unused, Words, assert_gradients, batch, share, step, words
from tests.groups.kinds import default_group
from tests.support.workers import run_workers

SIZES = [1, 2, 3, 4]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "small buckets, views": {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "no init sync": {"init_sync": False},
    "no buffers": {"broadcast_buffers": False},
}


def training(rank: int, size: int, options: dict[str, Any]) -> list[torch.Tensor]:
    with default_group("gloo", rank, size):
        ours, right = Net(), Net()
        if options.get("init_sync", True) and rank:
            with torch.no_grad():  # wrapping copies the values of rank 0
                for parameter in ours.parameters():
                    parameter.zero_()
        ddp = DistributedDataParallel(ours, **options)
        assert [name for name, _ in ddp.named_parameters()] == [
            f"module.{name}" for name, _ in right.named_parameters()
        ]
        for set_to_none in (True, False):
            for number in range(3):
                for module in (ours, right):
                    module.zero_grad(set_to_none)
                ddp(share(batch(size, number), rank)).mean().backward()
                right(batch(size, number)).mean().backward()
                assert_gradients(ours, right)
                for module in (ours, right):
                    step(module)
        if options.get("gradient_as_bucket_view"):
            assert all(parameter.grad._base is not None for parameter in ours.parameters())
        return list(ours.state_dict().values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_training(options, size):
    first = run_workers(training, size, (size, options))
    for values in first[1:]:
        assert all(a.equal(b) for a, b in zip(values, first[0], strict=True))
    if size == 3:  # bit for bit the same in every run
        again = run_workers(training, size, (size, options))
        assert all(a.equal(b) for a, b in zip(again[0], first[0], strict=True))


def other_models(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        for make, inputs in ((Mixed, batch), (Words, words)):
            for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
                ours, right = make(), make()
                ddp = DistributedDataParallel(ours, **options)
                for number in range(3):
                    ddp.zero_grad()
                    right.zero_grad()
                    ddp(share(inputs(size, number), rank)).mean().backward()
                    right(inputs(size, number)).mean().backward()
                    # In Mixed, the gradients in double precision are made of activations in single precision.
                    assert_gradients(ours, right, 1e-6 if make is Mixed else 1e-10)


@pytest.mark.parametrize("size", SIZES)
def test_mixed_dtypes_and_sparse_gradients(size):
    run_workers(other_models, size, (size,))


def unused(rank: int, size: int, options: dict[str, Any]) -> None:
    with default_group("gloo", rank, size):
        ours, right = Unused(), Unused()
        ddp = DistributedDataParallel(ours, **options)
        for number in range(4):
            ddp.zero_grad()
            right.zero_grad()
            use = rank == number % size
            ddp(share(batch(size, number), rank), use).mean().backward()
            parts = [right(share(batch(size, number), r), r == number % size).mean() / size for r in range(size)]
            sum(parts).backward()
            assert_gradients(ours, right)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("views", [False, True])
def test_unused_parameters(size, views):
    run_workers(unused, size, (size, {"find_unused_parameters": True, "gradient_as_bucket_view": views}))


def static_unused(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        for is_told_later in (False, True):
            ours, right = Unused(), Unused()
            ddp = DistributedDataParallel(ours, static_graph=not is_told_later, bucket_cap_mb=0.0001)
            if is_told_later:
                ddp._set_static_graph()
            assert ddp.static_graph
            for number in range(4):
                ddp.zero_grad()
                right.zero_grad()
                ddp(share(batch(size, number), rank), True).mean().backward()
                right(batch(size, number), True).mean().backward()
                assert_gradients(ours, right)


class Checkpointed(Net):
    """Runs the same layers in two checkpoints, so their gradients are accumulated twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = checkpoint(super().forward, x, use_reentrant=True)
        return once + checkpoint(super().forward, 2 * x, use_reentrant=True)


def static_checkpoints(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        for views in (False, True):
            ours, right = Checkpointed(), Checkpointed()
            ddp = DistributedDataParallel(ours, static_graph=True, gradient_as_bucket_view=views)
            for number in range(4):
                ddp.zero_grad(set_to_none=number < 2)  # then gradients are accumulated in the bucket buffers
                right.zero_grad()
                ddp(share(batch(size, number), rank).requires_grad_()).mean().backward()
                right(batch(size, number).requires_grad_()).mean().backward()
                assert_gradients(ours, right)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("job", [static_unused, static_checkpoints])
def test_static_graphs(job, size):
    # Torch's checkpoints import the compiler, which keeps the default group alive.
    run_workers(job, size, (size,), check=job is not static_checkpoints)


def accumulation(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        for options in OPTIONS.values():
            if options.get("static_graph"):
                continue  # each iteration has to be like the first
            ours, right = Net(), Net()
            ddp = DistributedDataParallel(ours, **options)
            for _ in range(2):
                ddp.zero_grad()
                right.zero_grad()
                for number in range(3):
                    with ddp.no_sync() if number < 2 else nullcontext():
                        ddp(share(batch(size, number), rank)).mean().backward()
                    right(batch(size, number)).mean().backward()
                assert_gradients(ours, right)


@pytest.mark.parametrize("size", SIZES)
def test_accumulation_without_sync(size):
    run_workers(accumulation, size, (size,))


def buffers(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        ddp = DistributedDataParallel(module)
        own = DistributedDataParallel(
            nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), broadcast_buffers=False
        )
        for number in range(3):
            for each in (ddp, own):
                each(share(batch(size, number), rank)).mean().backward()
        ddp(share(batch(size), 0))  # synchronises the buffers, and changes them on all ranks in the same way
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, module[0].running_mean)
        assert all(mean.equal(gathered[0]) for mean in gathered)
        dist.all_gather_object(gathered, own.module[0].running_mean)
        assert not gathered[0].equal(gathered[1])


def test_buffers():
    run_workers(buffers, 2, (2,))


def two_outputs(rank: int, size: int) -> None:
    """Two backward passes of one forward pass, which together compute all gradients."""
    with default_group("gloo", rank, size):

        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(5)
                self.a, self.b = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()

            def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
                return {"a": self.a(x), "b": self.b(x)}

        ours, right = Two(), Two()
        ddp = DistributedDataParallel(ours)
        for number in range(2):
            ddp.zero_grad()
            right.zero_grad()
            out, wanted = ddp(share(batch(size, number), rank)), right(batch(size, number))
            for name in ("a", "b"):
                out[name].pow(2).mean().backward()
                wanted[name].pow(2).mean().backward()
            assert_gradients(ours, right)


def test_two_backward_passes():
    run_workers(two_outputs, 2, (2,))


def test_one_rank_trains_like_an_unwrapped_module():
    ours, right = Net(), Net()
    ddp = DistributedDataParallel(ours, process_group=LonelyProcessGroup())
    for module, wrapped in ((ours, ddp), (right, right)):
        optimizer = torch.optim.Adam(module.parameters())
        for number in range(3):
            optimizer.zero_grad()
            wrapped(batch(1, number)).mean().backward()
            optimizer.step()
    assert all(a.equal(b) for a, b in zip(ours.parameters(), right.parameters(), strict=True))
