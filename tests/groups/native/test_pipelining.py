"""The schedules of ``torch.distributed.pipelining`` on the backend farprop: losses and gradients of one process.

A schedule exchanges activations and gradients between neighbours in batches of ``isend`` and ``irecv``, all of one tag,
in both directions at once, so a backend that mixes up the order of messages, or waits for a receive that is not posted
yet, gives wrong gradients or hangs.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

from tests.groups.kinds import default_group
from tests.groups.native.layouts import environment
from tests.support.workers import run_workers

WIDTH, SAMPLES, MICRO_BATCHES = 6, 24, 8

# The schedules, and how many stages each rank has.
SCHEDULES = {
    "ScheduleGPipe": 1,
    "Schedule1F1B": 1,
    "ScheduleInterleaved1F1B": 2,
    "ScheduleInterleavedZeroBubble": 2,
    "ScheduleZBVZeroBubble": 2,
}


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64)
    return x, y


def stages_of(name: str, rank: int, size: int, each: int) -> list[int]:
    """The stages of a rank: those of a V go down through the ranks and up again, others round and round."""
    if name == "ScheduleZBVZeroBubble":
        return [rank, 2 * size - 1 - rank]
    return [rank + size * turn for turn in range(each)]


def train(rank: int, size: int, names: list[str]) -> None:
    """All schedules in one job: torch takes seconds to import them."""
    with default_group("farprop", rank, size):
        for name in names:
            train_with(name, rank, size)
            dist.barrier()


def train_with(name: str, rank: int, size: int) -> None:
    each = SCHEDULES[name]
    count = size * each
    alone = nn.Sequential(*layers(count))
    x, y = batch()
    right = nn.functional.mse_loss(alone(x), y)
    right.backward()
    own = stages_of(name, rank, size, each)
    parts = layers(count)
    stages = [PipelineStage(parts[index], index, count, torch.device("cpu")) for index in own]
    schedule = getattr(schedules, name)(
        stages[0] if each == 1 else stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss
    )
    for _ in range(2):
        for part in parts:
            part.zero_grad()
        losses: list[torch.Tensor] = []
        is_last = count - 1 in own
        schedule.step(*([x] if 0 in own else []), target=y if is_last else None, losses=losses)
        assert len(losses) == (MICRO_BATCHES if is_last else 0)
        if is_last:
            torch.testing.assert_close(torch.stack(losses).mean(), right.detach(), rtol=0, atol=1e-12)
        for index in own:
            for parameter, expected in zip(parts[index].parameters(), alone[index].parameters(), strict=True):
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("layout", ["one", "tcp"])
def test_two_ranks(layout: str) -> None:
    run_workers(train, 2, (2, list(SCHEDULES)), environment(layout, 2), timeout=100)


def test_four_ranks() -> None:
    run_workers(train, 4, (4, ["Schedule1F1B", "ScheduleInterleavedZeroBubble"]), timeout=100)
