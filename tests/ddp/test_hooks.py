"""Communication hooks: torch's own, and a user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as default
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Net, assert_gradients, batch, share, step
from tests.groups.kinds import default_group
from tests.support.workers import run_workers

# Torch's DistributedDataParallel imports it when it is made.
IMPORTED_IN_WORKERS = ("torch._dynamo",)

Hook = Callable[[Any, Any], Future[torch.Tensor]]


def _power(hook: Hook) -> tuple[Any, Hook]:
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5), hook


def _hooks() -> dict[str, tuple[Any, Hook]]:
    """Hooks with new states, by name."""
    return {
        "allreduce": (None, default.allreduce_hook),
        "fp16": (None, default.fp16_compress_hook),
        "bf16": (None, default.bf16_compress_hook),
        "fp16 around": (None, default.fp16_compress_wrapper(default.allreduce_hook)),
        "bf16 around": (None, default.bf16_compress_wrapper(default.allreduce_hook)),
        "PowerSGD": _power(powerSGD_hook),
        "PowerSGD in fp16": _power(default.fp16_compress_wrapper(powerSGD_hook)),
        "local SGD": (PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False), post_localSGD_hook),
    }


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))


# Torch's DDP, until the process ends. It joins Gloo's thread when it is destroyed, while it holds the interpreter's
# lock, and that thread may need the lock to let go of the last callback of a hook.
_kept: list[Any] = []


def like_torch(rank: int, size: int, name: str) -> None:
    with default_group("gloo", rank, size):
        wrapped = []
        for class_ in (DistributedDataParallel, TorchDDP):
            ddp = class_(model())
            state, hook = _hooks()[name]
            if class_ is TorchDDP:
                ddp._check_comm_hook = lambda hook: None  # torch allows bf16 only on NCCL
            ddp.register_comm_hook(state, hook)
            wrapped.append(ddp)
        _kept.append(wrapped)
        for number in range(5):
            for ddp in wrapped:
                ddp.zero_grad()
                ddp(share(batch(size, number), rank).float()).pow(2).mean().backward()
            for ours, theirs in zip(wrapped[0].parameters(), wrapped[1].parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
            for ddp in wrapped:
                step(ddp)


@pytest.mark.parametrize("name", _hooks())
def test_torchs_hooks_give_the_same_gradients_as_in_torch(name):
    # Torch's DDP keeps its group alive for a while.
    run_workers(like_torch, 2, (2, name), check=False)


def custom_hook(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        for views in (False, True):
            ours, right = Net(), Net()
            ddp = DistributedDataParallel(ours, bucket_cap_mb=0.0001, gradient_as_bucket_view=views)
            seen: list[Any] = []

            def hook(state: list[Any], bucket: Any) -> Future[torch.Tensor]:
                state.append((bucket.index(), bucket.is_last()))
                gradients = bucket.gradients()
                assert [g.shape for g in gradients] == [p.shape for p in bucket.parameters()]
                assert sum(g.numel() for g in gradients) == bucket.buffer().numel()
                total = bucket.buffer().clone()  # not the bucket's memory
                work = dist.all_reduce(total, async_op=True)
                return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

            ddp.register_comm_hook(seen, hook)
            for number in range(3):
                seen.clear()
                ddp.zero_grad()
                right.zero_grad()
                ddp(share(batch(size, number), rank)).mean().backward()
                right(batch(size, number)).mean().backward()
                assert_gradients(ours, right)
                assert seen == [(index, index == len(seen) - 1) for index in range(len(seen))]
                assert (len(seen) > 1) == (number > 0)  # the first iteration has one bucket


def test_a_custom_hook():
    run_workers(custom_hook, 2, (2,))
