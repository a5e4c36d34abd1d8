"""A recommender: a sparse EmbeddingBag in a RemoteModule on a server, dense layers here, one DistributedOptimizer."""

from __future__ import annotations

import torch
from torch import nn

from bench.cases import Api
from bench.programs import Step

WORDS, WIDTH, BAG, BATCH = 1000, 16, 4, 16


class Table(nn.EmbeddingBag):
    def __init__(self) -> None:
        weight = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(1))
        super().__init__(WORDS, WIDTH, mode="sum", sparse=True, _weight=weight)


def dense() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8))


class Data:
    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(3)
        self._offsets = torch.arange(0, BATCH * BAG, BAG)

    def next(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        indices = torch.randint(WORDS, (BATCH * BAG,), generator=self._random)
        return indices, self._offsets, indices[::BAG] % 8


def prepare(api: Api) -> Step:
    rpc, autograd = api.rpc, api.autograd
    table = api.nn.RemoteModule("w1", Table)
    model = dense()
    parameters = [*table.remote_parameters(), *[rpc.RRef(parameter) for parameter in model.parameters()]]
    optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    data = Data()

    def step() -> float:
        indices, offsets, target = data.next()
        with autograd.context() as context:
            loss = nn.functional.cross_entropy(model(table.forward(indices, offsets)), target)
            autograd.backward(context, [loss])
            optimizer.step(context)
        return loss.item()

    return step


def alone() -> Step:
    table, model = Table(), dense()
    optimizer = torch.optim.SGD([*table.parameters(), *model.parameters()], lr=0.05)
    data = Data()

    def step() -> float:
        indices, offsets, target = data.next()
        loss = nn.functional.cross_entropy(model(table(indices, offsets)), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
