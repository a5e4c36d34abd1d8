"""Collectives and data-parallel training: farprop's backend and DistributedDataParallel against torch's on Gloo."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from bench.cases import Api, Sample, case

KB, MB = 1 << 10, 1 << 20
# bytes, samples, and the goal: torch's time over farprop's
SIZES = {"4 KB": (4 * KB, 200, 2), "1 MB": (MB, 40, 3), "25 MB": (25 * MB, 6, 3), "100 MB": (100 * MB, 3, 3)}


def _all_reduce(length: int) -> Callable[[Api, str], Sample]:
    def prepare(api: Api, _: str) -> Sample:
        group = api.group
        x = torch.ones(length // 4)
        dist.all_reduce(x, group=group)
        if not torch.equal(x, torch.full_like(x, dist.get_world_size())):
            raise AssertionError(f"{api.package} gave a wrong sum")
        x.zero_()  # repeated sums would overflow soon

        def sample() -> None:
            dist.all_reduce(x, group=group)

        return sample

    return prepare


for _ranks in (2, 4):
    for _size, (_length, _samples, _goal) in SIZES.items():
        case(
            f"all-reduce-{_size.replace(' ', '')}-{_ranks}",
            f"all-reduce {_size}, {_ranks} ranks",
            goal=_goal,
            samples=_samples,
            warmup=2,
            ranks=_ranks,
        )(_all_reduce(_length))


def _ddp_step(api: Api, group: dist.ProcessGroup | None) -> Sample:
    """A step of 8 layers of 1024×1024, without an optimizer: gradients accumulate over the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    wrapped = api.data_parallel(model, process_group=group)
    rank, size = dist.get_rank(), dist.get_world_size()
    inputs = torch.randn(8 * size, 1024)
    mine = inputs[8 * rank : 8 * (rank + 1)]

    def step() -> None:
        wrapped(mine).sum().backward()

    step()
    whole = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    whole.load_state_dict(model.state_dict())
    (whole(inputs).sum() / size).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        if not torch.allclose(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4):
            raise AssertionError(f"{api.package} gave wrong gradients")
    return step


@case("ddp", "DDP step, farprop's backend against Gloo", goal=2, samples=6, warmup=2, ranks=2)
@case("ddp-4", "DDP step, farprop's backend against Gloo, 4 ranks", goal=1.6, samples=6, warmup=2, ranks=4)
def ddp(api: Api, _: str) -> Sample:
    return _ddp_step(api, api.group)


@case("ddp-gloo", "DDP step, both on Gloo", goal=1.0, samples=6, warmup=2, ranks=2)
def ddp_on_gloo(api: Api, _: str) -> Sample:
    return _ddp_step(api, None)
