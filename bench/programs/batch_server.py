"""A parameter server that waits for the gradients of both trainers, and answers each with the new model."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from bench.cases import Api
from bench.programs import Step
from bench.side import side

TRAINERS, STEPS, BATCH, WIDTH = 2, 10, 16, 64


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))


class Data:
    def __init__(self, trainer: int) -> None:
        self._random = torch.Generator().manual_seed(10 + trainer)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randn(BATCH, 32, generator=self._random)
        return inputs, inputs[:, :8].tanh()


def gradients_of(model: nn.Module, data: Data) -> tuple[float, list[torch.Tensor]]:
    inputs, target = data.next()
    model.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), target)
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters()]


class Optimizer:
    """Steps a model with the mean of all trainers' gradients, added in the order of the trainers."""

    def __init__(self) -> None:
        self.model = make_model()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def step(self, gradients: dict[int, list[torch.Tensor]]) -> None:
        columns = zip(*(gradients[trainer] for trainer in sorted(gradients)), strict=True)
        for parameter, column in zip(self.model.parameters(), columns, strict=True):
            parameter.grad = sum(column) / TRAINERS
        self._optimizer.step()
        self._optimizer.zero_grad()


class Server:
    def __init__(self) -> None:
        self._optimizer = Optimizer()
        self._lock = threading.Lock()
        self._next = torch.futures.Future()
        self._gradients: dict[int, list[torch.Tensor]] = {}

    def update(self, trainer: int, gradients: list[torch.Tensor]) -> torch.futures.Future:
        with self._lock:
            self._gradients[trainer] = gradients
            future = self._next
            if len(self._gradients) == TRAINERS:
                self._optimizer.step(self._gradients)
                self._gradients, self._next = {}, torch.futures.Future()
                future.set_result(self._optimizer.model)
            return future


@side.async_execution
def update_and_fetch_model(server: Any, trainer: int, gradients: list[torch.Tensor]) -> torch.futures.Future:
    return server.local_value().update(trainer, gradients)


class Trainer:
    def __init__(self, server: Any, trainer: int) -> None:
        self._server, self._trainer = server, trainer
        self._model, self._data = make_model(), Data(trainer)

    def train(self) -> float:
        for _ in range(STEPS):
            loss, gradients = gradients_of(self._model, self._data)
            args = (self._server, self._trainer, gradients)
            self._model = side.rpc.rpc_sync(self._server.owner(), update_and_fetch_model, args=args)
        return loss


def prepare(api: Api) -> Step:
    rpc = api.rpc
    server = rpc.RRef(Server())
    trainers = [rpc.remote(f"w{number + 1}", Trainer, args=(server, number)) for number in range(TRAINERS)]

    def step() -> float:
        futures = [trainer.rpc_async().train() for trainer in trainers]
        return sum(torch.futures.wait_all(futures)) / TRAINERS

    return step


def alone() -> Step:
    optimizer = Optimizer()
    data = [Data(trainer) for trainer in range(TRAINERS)]

    def step() -> float:
        for _ in range(STEPS):
            gradients, total = {}, 0.0
            for trainer in range(TRAINERS):
                loss, gradients[trainer] = gradients_of(optimizer.model, data[trainer])
                total += loss
            optimizer.step({trainer: [g.clone() for g in gradients[trainer]] for trainer in gradients})
        return total / TRAINERS

    return step
