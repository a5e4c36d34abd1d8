"""`python -m bench.pipeline_bubble`: how long the stages of a pipeline have nothing to do, beside the ideal.

Each stage has a worker. A stage does not compute, it waits for a known time, so that there may be more stages than
cores: what is measured is the schedule and what calls cost, and not the machine. If each of ``p`` stages works for the
same time on each of ``m`` micro-batches, a stage has nothing to do for ``(p - 1) / (m + p - 1)`` of a step, with either
schedule. The measured bubble is the rest of the step's time, as the caller sees it, beside the stage's work.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.multiprocessing as mp

from bench import machine

FORWARD, BACKWARD = 0.02, 0.04  # seconds that a stage takes for a micro-batch
STAGES = (2, 4)
MICRO_BATCHES = (4, 8, 16)
STEPS = 5


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD)
        return gradient


class _Stage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = _Wait.apply(x * self.weight)
        return waited


def _seconds(stages: int, micro_batches: int, schedule: str) -> float:
    """The median time of a step."""
    import farprop
    import farprop.autograd as dist_autograd

    pipe = farprop.pipeline(
        [(f"w{stage + 1}", _Stage) for stage in range(stages)], micro_batches=micro_batches, schedule=schedule
    )
    x = torch.rand(micro_batches, 64)
    taken = []
    for _ in range(1 + STEPS):  # the first is for imports and the like
        with dist_autograd.context():
            began = time.perf_counter()
            pipe.step(x, x, loss_fn=torch.nn.functional.mse_loss)
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _worker(rank: int, path: str) -> None:
    import farprop.rpc as rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=120)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=max(STAGES) + 1, rpc_backend_options=options)
    if rank == 0:
        print(
            "| stages | micro-batches | ideal bubble | `1f1b` | `gpipe` |\n| --- | --- | --- | --- | --- |", flush=True
        )
        for stages in STAGES:
            for micro_batches in MICRO_BATCHES:
                work = micro_batches * (FORWARD + BACKWARD)
                measured = [1 - work / _seconds(stages, micro_batches, schedule) for schedule in ("1f1b", "gpipe")]
                ideal = (stages - 1) / (micro_batches + stages - 1)
                shown = " | ".join(f"{bubble:.1%}" for bubble in (ideal, *measured))
                print(f"| {stages} | {micro_batches} | {shown} |", flush=True)
    rpc.shutdown()


def main() -> int:
    print(machine.describe(machine.facts()))
    print(
        f"A forward waits for {FORWARD * 1e3:.0f} ms, a backward for {BACKWARD * 1e3:.0f} ms; medians of {STEPS} steps."
    )
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_worker, (f"{directory}/store",), nprocs=max(STAGES) + 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
