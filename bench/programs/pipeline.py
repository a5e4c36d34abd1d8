"""A convolutional network in two stages on two workers: four micro-batches pass through references, one backward."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from bench.cases import Api
from bench.programs import Step
from bench.side import side

MICRO_BATCHES, BATCH, SIZE, CHANNELS, CLASSES = 4, 16, 16, 16, 10


class Stage(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        torch.manual_seed(1 if first else 2)
        if first:
            self.layers = nn.Sequential(
                nn.Conv2d(3, CHANNELS, 3, padding=1),
                nn.ReLU(),
                nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1),
                nn.ReLU(),
            )
        else:
            self.layers = nn.Sequential(
                nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, stride=2, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(2 * CHANNELS, CLASSES),
            )


class RemoteStage(Stage):
    def __init__(self, first: bool) -> None:
        super().__init__(first)
        self._lock = threading.Lock()

    def forward(self, batch: Any) -> torch.Tensor:
        values = batch.to_here()
        with self._lock:
            return self.layers(values)

    def parameter_references(self) -> list[Any]:
        return [side.rpc.RRef(parameter) for parameter in self.parameters()]


class Data:
    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(3)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(BATCH, 3, SIZE, SIZE, generator=self._random)
        return images, torch.randint(CLASSES, (BATCH,), generator=self._random)


def prepare(api: Api) -> Step:
    rpc, autograd = api.rpc, api.autograd
    first, second = (rpc.remote(f"w{rank}", RemoteStage, args=(rank == 1,)) for rank in (1, 2))
    parameters = [reference for stage in (first, second) for reference in stage.rpc_sync().parameter_references()]
    optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    data = Data()

    def step() -> float:
        images, target = data.next()
        with autograd.context() as context:
            futures = []
            for micro_batch in images.split(BATCH // MICRO_BATCHES):
                between = first.remote().forward(rpc.RRef(micro_batch))
                futures.append(second.rpc_async().forward(between))
            output = torch.cat(torch.futures.wait_all(futures))
            loss = nn.functional.cross_entropy(output, target)
            autograd.backward(context, [loss])
            optimizer.step(context)
        return loss.item()

    return step


def alone() -> Step:
    stages = nn.Sequential(Stage(first=True).layers, Stage(first=False).layers)
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.05)
    data = Data()

    def step() -> float:
        images, target = data.next()
        output = torch.cat([stages(micro_batch) for micro_batch in images.split(BATCH // MICRO_BATCHES)])
        loss = nn.functional.cross_entropy(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
