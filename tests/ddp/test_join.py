"""Uneven inputs: ``join``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Net, Unused, batch, share, step
from tests.groups.kinds import default_group
from tests.support.workers import run_workers


def same_everywhere(module: nn.Module, size: int) -> bool:
    states: list[Any] = [None] * size
    dist.all_gather_object(states, [value.clone() for value in module.state_dict().values()])
    return all(all(a.equal(b) for a, b in zip(state, states[0], strict=True)) for state in states)


def uneven(rank: int, size: int, options: dict[str, Any], divides_by_all: bool) -> None:
    """Rank r has r inputs, so rank 0 has none."""
    with default_group("farprop", rank, size):
        make = Unused if options.get("find_unused_parameters") else Net
        ours, right = make(), make()
        ddp = DistributedDataParallel(ours, **options)
        for _ in range(2):  # the second time with rebuilt buckets
            with ddp.join(divide_by_initial_world_size=divides_by_all):
                for number in range(rank):
                    ddp.zero_grad()
                    ddp(share(batch(size, number), rank)).mean().backward()
                    step(ours)
            for number in range(size - 1):
                right.zero_grad()
                active = [r for r in range(size) if number < r]
                for r in active:
                    divisor = size if divides_by_all else len(active)
                    (right(share(batch(size, number), r)).mean() / divisor).backward()
                step(right)
            for a, b in zip(ours.parameters(), right.parameters(), strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
            assert same_everywhere(ours, size)


@pytest.mark.parametrize("divides_by_all", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.0001}, {"find_unused_parameters": True}],
    ids=["plain", "views", "small buckets", "unused"],
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_uneven_inputs(size, options, divides_by_all):
    run_workers(uneven, size, (size, options, divides_by_all))


def uneven_buffers(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        ddp = DistributedDataParallel(module)
        with ddp.join():
            for number in range(2 + rank):
                if number == 0:
                    with ddp.no_sync():
                        ddp(share(batch(size, number), rank)).mean().backward()
                else:
                    ddp(share(batch(size, number), rank)).mean().backward()
        assert same_everywhere(module, size)
        assert int(module[0].num_batches_tracked) == 1 + size


def test_uneven_inputs_with_buffers_and_no_sync():
    run_workers(uneven_buffers, 3, (3,))


def early(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        ddp = DistributedDataParallel(Net())
        with (
            pytest.raises(RuntimeError, match="exhausted"),
            ddp.join(throw_on_early_termination=True),
        ):
            for number in range(1 + rank):
                ddp(share(batch(size, number), rank)).mean().backward()


def test_throw_on_early_termination():
    run_workers(early, 2, (2,))
