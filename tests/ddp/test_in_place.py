"""On the backend farprop, large gradients are reduced in ``.grad`` itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from farprop.errors import ReductionError
from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Words, assert_gradients, share, step, words
from tests.groups.kinds import default_group
from tests.support.workers import run_workers

WIDTH = 256  # a weight has 512 KiB, enough to be reduced in place
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"bucket_cap_mb": 1},  # launched during the backward pass, however many processors there are
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def wide() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], nn.Linear(WIDTH, 3)).double()


def inputs(size: int, number: int) -> torch.Tensor:
    return torch.randn(2 * size, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def training(rank: int, size: int, options: dict[str, Any]) -> list[torch.Tensor]:
    with default_group("farprop", rank, size):
        ours, right = wide(), wide()
        ddp = DistributedDataParallel(ours, **options)
        for number, set_to_none in enumerate([True, True, False, None, None]):
            if set_to_none is not None:  # else gradients are added to those of the last iteration
                ddp.zero_grad(set_to_none)
                right.zero_grad(set_to_none)
            whole = inputs(size, number)
            if number == 4:
                with ddp.no_sync():
                    ddp(share(whole, rank)).mean().backward()
                right(whole).mean().backward()
            ddp(share(whole, rank)).mean().backward()
            right(whole).mean().backward()
            assert_gradients(ours, right)
        return [parameter.grad.clone() for parameter in ours.parameters()]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_the_same_as_in_one_process_and_on_all_ranks(size, options):
    first, *others = run_workers(training, size, (size, options))
    for other in others:
        assert all(a.equal(b) for a, b in zip(first, other, strict=True))


def sparse(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        ours, right = Words(), Words()
        ddp = DistributedDataParallel(ours)
        for number in range(3):
            for module in (ours, right):
                module.zero_grad()
            ddp(share(words(size, number), rank)).mean().backward()
            right(words(size, number)).mean().backward()
            for a, b in zip(ours.parameters(), right.parameters(), strict=True):
                torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())


def test_sparse_gradients_are_averaged_too():
    run_workers(sparse, 2, (2,))


def kept(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        ours = wide()
        ddp = DistributedDataParallel(ours)
        gradients = []
        for number in range(4):
            ddp.zero_grad()
            ddp(share(inputs(size, number), rank)).mean().backward()
            gradients.append((ours[0].weight.grad, ours[0].weight.grad.clone()))
        for gradient, copy in gradients:
            assert gradient.equal(copy)


def test_a_gradient_that_the_program_keeps_does_not_change():
    run_workers(kept, 2, (2,))


def hooked(rank: int, size: int, options: dict[str, Any]) -> None:
    with default_group("farprop", rank, size):
        ours, right, alone = wide(), wide(), wide()
        ddp = DistributedDataParallel(ours, **options)
        seen: list[torch.Tensor] = []

        def hook(leaf: torch.Tensor) -> None:
            seen.append(leaf.grad.clone())
            leaf.grad.zero_()

        ours[1].weight.register_post_accumulate_grad_hook(hook)
        for number in range(3):
            whole = inputs(size, number)
            for module in (ours, right, alone):
                module.zero_grad()
            ddp(share(whole, rank)).mean().backward()
            right(whole).mean().backward()
            alone(share(whole, rank)).mean().backward()
            torch.testing.assert_close(seen.pop(), alone[1].weight.grad)
            assert_gradients(ours, right)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["buckets"]], ids=["plain", "buckets"])
def test_a_later_hook_sees_the_gradient_of_its_rank_and_can_not_change_the_average(options):
    run_workers(hooked, 2, (2, options))


def uneven(rank: int, size: int) -> list[torch.Tensor]:
    with default_group("farprop", rank, size):
        ours = wide()
        ddp = DistributedDataParallel(ours)
        with ddp.join():
            for number in range(2 + 2 * rank):
                ddp.zero_grad()
                ddp(share(inputs(size, number), rank)).mean().backward()
                step(ours)
        return list(ours.state_dict().values())


def test_ranks_without_input_shadow_reductions_in_place():
    first, second = run_workers(uneven, 2, (2,))
    assert all(a.equal(b) for a, b in zip(first, second, strict=True))


class Boom(RuntimeError):
    pass


def raising(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        ours, right = wide(), wide()
        ddp = DistributedDataParallel(ours, bucket_cap_mb=1)
        for number in range(3):
            ddp.zero_grad()
            right.zero_grad()
            ddp(share(inputs(size, number), rank)).mean().backward()
            right(inputs(size, number)).mean().backward()

        def boom(_: torch.Tensor) -> None:
            raise Boom

        handle = ours[0].weight.register_hook(boom)
        with pytest.raises(Boom):
            ddp(share(inputs(size, 3), rank)).mean().backward()
        handle.remove()
        lent = ours[2].weight.grad
        with pytest.raises(ReductionError):
            ddp(share(inputs(size, 3), rank))
        assert ours[2].weight.grad is not lent  # a reduction could still write to it
        for number in (4, 5):
            ddp.zero_grad()
            right.zero_grad()
            ddp(share(inputs(size, number), rank)).mean().backward()
            right(inputs(size, number)).mean().backward()
            assert_gradients(ours, right)


def test_a_pass_that_raises_between_reductions_gives_gradients_back():
    run_workers(raising, 2, (2,))
