"""TorchRL's RPC collector: two workers step through environments with a policy, and send the frames."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors.distributed import RPCCollector
from torchrl.envs import EnvCreator, PendulumEnv

from bench.clients.programs import job


class Push(nn.Module):
    """Pushes against the motion; deterministic."""

    def forward(self, speed: torch.Tensor) -> torch.Tensor:
        return -speed.unsqueeze(-1).clamp(-2, 2)


def make_world() -> PendulumEnv:
    world = PendulumEnv()
    world.set_seed(50)
    return world


def main(batches: int, frames: int) -> None:
    policy = TensorDictModule(Push(), in_keys=["thdot"], out_keys=["action"])
    collector = RPCCollector(
        [EnvCreator(make_world)] * 2,
        policy,
        frames_per_batch=frames,
        total_frames=batches * frames,
        launcher="mp",
        sync=True,
        tcp_port=str(job.free_port()),
    )
    clock = job.Clock()
    rewards, sizes = [], []
    for batch in collector:
        rewards.append(float(batch["next", "reward"].sum()))
        sizes.append(batch.numel())
    seconds = clock.read()
    collector.shutdown()
    job.report(seconds, {"rewards": rewards, "sizes": sizes})


if __name__ == "__main__":
    batches, frames = (2, 20) if job.tiny() else (10, 400)
    main(batches, frames)
