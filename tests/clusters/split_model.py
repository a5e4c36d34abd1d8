"""A model in stages, one a worker, and its training with checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.launch.pool import WorkerPool
from farprop.optim import DistributedOptimizer

WIDTH = 8
RATE = 0.5
CHECKPOINT_STEPS = 5


class Stage(nn.Module):
    """A part of the model. Its first weights depend on its index alone."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))

    def parameter_references(self) -> list[rpc.RRef[torch.Tensor]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(16, WIDTH, generator=generator)
    return x, torch.sin(x)


def train_alone(stages: int, steps: int) -> list[float]:
    """The losses of the same training in one process."""
    model = nn.Sequential(*(Stage(index) for index in range(stages)))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Training:
    """A training that can go on from its last checkpoint after an error."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.step = 0
        self.losses: list[float] = []
        self._states: list[dict[str, Any]] | None = None

    def run(self, steps: int, before_step: Callable[[int], None]) -> None:
        self.losses = self.losses[: self.step]
        stages = [worker.remote(Stage, index) for index, worker in enumerate(self._pool)]
        if self._states is not None:
            for stage, state in zip(stages, self._states, strict=True):
                stage.rpc_sync().load_state_dict(state)
        parameters = [reference for stage in stages for reference in stage.rpc_sync().parameter_references()]
        optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=RATE)
        for step in range(self.step, steps):
            before_step(step)
            x, y = batch(step)
            with dist_autograd.context() as context:
                for stage in stages:
                    x = stage.rpc_sync().forward(x)
                loss = nn.functional.mse_loss(x, y)
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
            self.losses.append(loss.item())
            if (step + 1) % CHECKPOINT_STEPS == 0:
                self._states = [stage.rpc_sync().state_dict() for stage in stages]
                self.step = step + 1
