"""A language model whose tables are on another worker: dist_autograd and DistributedOptimizer train both parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.optim import DistributedOptimizer

from bench.clients.programs import job


class Embedding(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(words, width)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.table(text)


class Decoder(nn.Module):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.linear = nn.Linear(width, words)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.linear(states)


def references(module: Any) -> list[Any]:
    return [rpc.RRef(parameter) for parameter in module.local_value().parameters()]


def norms(module: Any) -> list[float]:
    return [parameter.norm().item() for parameter in module.local_value().parameters()]


class Model(nn.Module):
    def __init__(self, server: str, words: int, width: int) -> None:
        super().__init__()
        self.embedding = rpc.remote(server, Embedding, args=(words, width))
        torch.manual_seed(7)
        self.recurrent = nn.LSTM(width, width, 2)
        self.decoder = rpc.remote(server, Decoder, args=(words, width))

    def forward(self, text: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        states, hidden = self.recurrent(self.embedding.rpc_sync().forward(text), hidden)
        return self.decoder.rpc_sync().forward(states), hidden

    def parameter_references(self) -> list[Any]:
        remote = [
            reference
            for module in (self.embedding, self.decoder)
            for reference in rpc.rpc_sync(module.owner(), references, args=(module,))
        ]
        return [*remote, *(rpc.RRef(parameter) for parameter in self.recurrent.parameters())]


def run_worker(rank: int, words: int, width: int, length: int, steps: int) -> tuple[float, Any] | None:
    if rank:
        return None
    batch = 16
    model = Model("server", words, width)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameter_references(), lr=0.5)
    text = torch.randint(words, (length + 1, batch), generator=torch.Generator().manual_seed(8))
    hidden = (torch.zeros(2, batch, width), torch.zeros(2, batch, width))
    losses = []
    clock = job.Clock()
    for _ in range(steps):
        with dist_autograd.context() as context:
            hidden = tuple(state.detach() for state in hidden)
            output, hidden = model(text[:-1], hidden)
            loss = nn.functional.cross_entropy(output.view(-1, words), text[1:].reshape(-1))
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
            losses.append(loss.item())
    seconds = clock.read()
    remote = [rpc.rpc_sync(module.owner(), norms, args=(module,)) for module in (model.embedding, model.decoder)]
    return seconds, {"losses": losses, "remote": remote, "local": [p.norm().item() for p in model.parameters()]}


if __name__ == "__main__":
    words, width, length, steps = (50, 16, 4, 3) if job.tiny() else (2000, 128, 20, 60)
    job.run(run_worker, ["trainer", "server"], words, width, length, steps)
