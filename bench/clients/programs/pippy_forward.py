"""PiPPy over RPC: a model is split in two stages, and batches pass through it in chunks."""

from __future__ import annotations

from typing import Any

import torch
from pippy import PipelineDriverFillDrain
from pippy.IR import MultiUseParameterConfig, Pipe, pipe_split
from pippy.microbatch import TensorChunkSpec
from torch import nn

from bench.clients.programs import job


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(70)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values).relu()
        pipe_split()
        return self.second(values).tanh()


def run_worker(rank: int, width: int, rounds: int) -> tuple[float, Any] | None:
    if rank:
        return None
    pipe = Pipe.from_tracing(Model(width), MultiUseParameterConfig.REPLICATE)
    driver = PipelineDriverFillDrain(
        pipe,
        4,
        args_chunk_spec=(TensorChunkSpec(0),),
        kwargs_chunk_spec={},
        output_chunk_spec=TensorChunkSpec(0),
        world_size=2,
    )
    data = torch.Generator().manual_seed(71)
    sums = []
    clock = job.Clock()
    for _ in range(rounds):
        sums.append(float(driver(torch.randn(64, width, generator=data)).sum()))
    return clock.read(), {"sums": sums}


if __name__ == "__main__":
    width, rounds = (16, 2) if job.tiny() else (512, 30)
    job.run(run_worker, ["worker0", "worker1"], width, rounds)
