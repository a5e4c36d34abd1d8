"""Trainers send gradients to a parameter server, which answers all of them when it has them all (async_execution)."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import nn

from bench.clients.programs import job

TRAINERS = 3


def make_model(width: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))


class Server:
    def __init__(self, width: int) -> None:
        self.model = make_model(width)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self._lock = threading.Lock()
        self._gradients: dict[int, list[torch.Tensor]] = {}
        self._next = torch.futures.Future()

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach() for parameter in self.model.parameters()]

    @staticmethod
    @rpc.functions.async_execution
    def update(server: Any, trainer: int, gradients: list[torch.Tensor]) -> torch.futures.Future:
        self = server.local_value()
        with self._lock:
            self._gradients[trainer] = gradients
            answer = self._next
            if len(self._gradients) == TRAINERS:
                # In the order of trainers, not of arrival: sums of floats depend on it.
                columns = zip(*(self._gradients[rank] for rank in sorted(self._gradients)), strict=True)
                for parameter, column in zip(self.model.parameters(), columns, strict=True):
                    parameter.grad = torch.stack(column).mean(0)
                self.optimizer.step()
                self._gradients = {}
                self._next = torch.futures.Future()
                answer.set_result([parameter.clone() for parameter in self.parameters()])
        return answer


def train(server: Any, trainer: int, width: int, steps: int) -> list[float]:
    model = make_model(width)
    data = torch.Generator().manual_seed(trainer)
    losses = []
    for _ in range(steps):
        inputs = torch.randn(32, 64, generator=data)
        target = inputs[:, :8].tanh()
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        losses.append(loss.item())
        gradients = [parameter.grad for parameter in model.parameters()]
        fresh = rpc.rpc_sync(server.owner(), Server.update, args=(server, trainer, gradients))
        with torch.no_grad():
            for parameter, new in zip(model.parameters(), fresh, strict=True):
                parameter.copy_(new)
    return losses


def run_worker(rank: int, width: int, steps: int) -> tuple[float, Any] | None:
    if rank:
        return None
    server = rpc.RRef(Server(width))
    clock = job.Clock()
    futures = [
        rpc.rpc_async(f"trainer{trainer}", train, args=(server, trainer, width, steps), timeout=0)
        for trainer in range(TRAINERS)
    ]
    losses = [future.wait() for future in futures]
    seconds = clock.read()
    last = server.local_value().parameters()
    return seconds, {
        "losses": [trainer[:: max(1, steps // 10)] for trainer in losses],
        "norms": [parameter.norm().item() for parameter in last],
    }


if __name__ == "__main__":
    width, steps = (32, 5) if job.tiny() else (512, 250)
    job.run(run_worker, ["server", *(f"trainer{trainer}" for trainer in range(TRAINERS))], width, steps)
