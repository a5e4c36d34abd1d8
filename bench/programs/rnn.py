"""A language model: embedding table and decoder on a server, LSTM on the trainer, one DistributedOptimizer for all."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from bench.cases import Api
from bench.programs import Step
from bench.side import side

WORDS, WIDTH, LENGTH, BATCH = 200, 32, 10, 8


# Two modules may be made at the same time on the server, and both use torch's global random generator.
_making = threading.Lock()


def make(kind: type[nn.Module], seed: int, *args: Any) -> nn.Module:
    with _making:
        torch.manual_seed(seed)
        return kind(*args)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.0)
        self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.linear(self.drop(states))


class Recurrent(nn.Module):
    """The trainer's part, around two parts that may be anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2)

    def forward(self, embed: Any, decode: Any, text: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        states, hidden = self.lstm(embed(text), hidden)
        return decode(states), hidden


class Data:
    def __init__(self) -> None:
        self._random = torch.Generator().manual_seed(4)
        self.hidden = (torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH))

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(WORDS, (LENGTH + 1, BATCH), generator=self._random)
        self.hidden = (self.hidden[0].detach(), self.hidden[1].detach())
        return text[:-1], text[1:].reshape(-1)


def parameter_references(module: Any) -> list[Any]:
    return [side.rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def prepare(api: Api) -> Step:
    rpc, autograd = api.rpc, api.autograd
    embedding = rpc.remote("w1", make, args=(nn.Embedding, 1, WORDS, WIDTH))
    decoder = rpc.remote("w1", make, args=(Decoder, 2))
    model = make(Recurrent, 3)
    parameters = [
        *rpc.rpc_sync("w1", parameter_references, args=(embedding,)),
        *[rpc.RRef(parameter) for parameter in model.parameters()],
        *rpc.rpc_sync("w1", parameter_references, args=(decoder,)),
    ]
    optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    data = Data()

    def step() -> float:
        text, target = data.next()
        with autograd.context() as context:
            embed, decode = embedding.rpc_sync().forward, decoder.rpc_sync().forward
            output, data.hidden = model(embed, decode, text, data.hidden)
            loss = nn.functional.cross_entropy(output.view(-1, WORDS), target)
            autograd.backward(context, [loss])
            optimizer.step(context)
            return loss.item()

    return step


def alone() -> Step:
    embedding, decoder, model = make(nn.Embedding, 1, WORDS, WIDTH), make(Decoder, 2), make(Recurrent, 3)
    parameters = [*embedding.parameters(), *model.parameters(), *decoder.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05)
    data = Data()

    def step() -> float:
        text, target = data.next()
        output, data.hidden = model(embedding, decoder, text, data.hidden)
        loss = nn.functional.cross_entropy(output.view(-1, WORDS), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step
