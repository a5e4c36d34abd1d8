"""A model in two remote parts, and micro-batches that pass through them in a pipeline."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from bench.clients.programs import job


class Part(nn.Module):
    def __init__(self, seed: int, sizes: list[int]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for here, there in itertools.pairwise(sizes):
            layers += [nn.Linear(here, there), nn.Tanh()]
        self.layers = nn.Sequential(*layers)
        self._lock = threading.Lock()

    def forward(self, batch: Any) -> torch.Tensor:
        values = batch.to_here()
        with self._lock:
            return self.layers(values)

    def parameter_references(self) -> list[Any]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def norms(self) -> list[float]:
        return [parameter.norm().item() for parameter in self.parameters()]


class Pipeline:
    def __init__(self, width: int, pieces: int) -> None:
        self._pieces = pieces
        self.parts = [
            rpc.remote("part0", Part, args=(11, [64, width, width, width])),
            rpc.remote("part1", Part, args=(12, [width, width, width, 16])),
        ]

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        first, second = self.parts
        outputs = []
        for piece in inputs.chunk(self._pieces):
            between = first.remote().forward(rpc.RRef(piece))
            outputs.append(second.rpc_async().forward(between))
        return torch.cat(torch.futures.wait_all(outputs))


def run_worker(rank: int, width: int, batch: int, pieces: int, steps: int) -> tuple[float, Any] | None:
    if rank:
        return None
    pipeline = Pipeline(width, pieces)
    parameters = [reference for part in pipeline.parts for reference in part.rpc_sync().parameter_references()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    data = torch.Generator().manual_seed(13)
    losses = []
    clock = job.Clock()
    for _ in range(steps):
        inputs = torch.randn(batch, 64, generator=data)
        with dist_autograd.context() as context:
            loss = nn.functional.mse_loss(pipeline(inputs), inputs[:, :16].sin())
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    seconds = clock.read()
    return seconds, {"losses": losses, "norms": [part.rpc_sync().norms() for part in pipeline.parts]}


if __name__ == "__main__":
    width, batch, pieces, steps = (16, 8, 2, 3) if job.tiny() else (512, 256, 8, 80)
    job.run(run_worker, ["master", "part0", "part1"], width, batch, pieces, steps)
