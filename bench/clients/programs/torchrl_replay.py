"""TorchRL's remote replay buffer: one worker keeps it, another one fills it and samples from it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.rpc as rpc
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, RandomSampler, RemoteTensorDictReplayBuffer
from torchrl.data.replay_buffers.writers import RoundRobinWriter

from bench.clients.programs import job


class Buffer(RemoteTensorDictReplayBuffer):
    def __init__(self, capacity: int) -> None:
        super().__init__(
            storage=LazyMemmapStorage(capacity),
            sampler=RandomSampler(),
            writer=RoundRobinWriter(),
            batch_size=64,
            generator=torch.Generator().manual_seed(40),
        )


def length(buffer: Any) -> int:
    return len(buffer.local_value())


def run_worker(rank: int, rounds: int, width: int) -> tuple[float, Any] | None:
    if rank:
        return None
    buffer = rpc.remote("buffer", Buffer, args=(1024,))
    owner = buffer.owner()
    data = torch.Generator().manual_seed(41)
    sums = []
    clock = job.Clock()
    for _ in range(rounds):
        batch = TensorDict(
            {
                "observation": torch.randn(32, width, generator=data),
                "reward": torch.randn(32, 1, generator=data),
            },
            [32],
        )
        rpc.rpc_sync(owner, Buffer.extend, args=(buffer, batch))
        sample = rpc.rpc_sync(owner, Buffer.sample, args=(buffer, 64))
        sums.append(float(sample["observation"].sum() + sample["reward"].sum()))
    return clock.read(), {"sums": sums, "length": rpc.rpc_sync(owner, length, args=(buffer,))}


if __name__ == "__main__":
    rounds, width = (3, 16) if job.tiny() else (500, 1024)
    job.run(run_worker, ["trainer", "buffer"], rounds, width)
