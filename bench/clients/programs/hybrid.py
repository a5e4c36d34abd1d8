"""Two trainers: dense layers under DistributedDataParallel, embeddings in remote modules on a parameter server."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.nn import RemoteModule
from torch.distributed.optim import DistributedOptimizer
from torch.nn.parallel import DistributedDataParallel

from bench.clients.programs import job

TRAINERS = 2


class Table(nn.EmbeddingBag):
    """Has its own random generator, because both tables may be made at the same time in one process."""

    def __init__(self, words: int, width: int, seed: int) -> None:
        weight = torch.randn(words, width, generator=torch.Generator().manual_seed(seed))
        super().__init__(words, width, mode="sum", _weight=weight)


class Model(nn.Module):
    """Each trainer has its own table, because two trainers would update one table in random order."""

    def __init__(self, trainer: int, words: int, width: int) -> None:
        super().__init__()
        self.table = RemoteModule("server", Table, args=(words, width, 20 + trainer))
        torch.manual_seed(30)
        self.dense = DistributedDataParallel(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8)),
        )

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.dense(self.table.forward(indices, offsets))


def train(trainer: int, port: int, words: int, width: int, steps: int) -> dict[str, Any]:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=trainer, world_size=TRAINERS)
    model = Model(trainer, words, width)
    parameters = [*model.table.remote_parameters(), *(rpc.RRef(p) for p in model.dense.parameters())]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.05)
    data = torch.Generator().manual_seed(trainer)
    losses = []
    for _ in range(steps):
        indices = torch.randint(words, (64 * 8,), generator=data)
        offsets = torch.arange(0, 64 * 8, 8)
        target = indices[offsets] % 8
        with dist_autograd.context() as context:
            loss = nn.functional.cross_entropy(model(indices, offsets), target)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        losses.append(loss.item())
    table = model.table.remote_parameters()[0].to_here().norm().item()
    dense = [parameter.norm().item() for parameter in model.dense.parameters()]
    dist.destroy_process_group()
    return {"losses": losses, "table": table, "dense": dense}


def run_worker(rank: int, port: int, words: int, width: int, steps: int) -> tuple[float, Any] | None:
    if rank:
        return None
    clock = job.Clock()
    futures = [
        rpc.rpc_async(f"trainer{trainer}", train, args=(trainer, port, words, width, steps), timeout=0)
        for trainer in range(TRAINERS)
    ]
    values = [future.wait() for future in futures]
    return clock.read(), values


if __name__ == "__main__":
    words, width, steps = (40, 8, 3) if job.tiny() else (2000, 128, 200)
    job.run(run_worker, ["master", "server", "trainer0", "trainer1"], job.free_port(), words, width, steps)
