"""`python -m bench.pipeline_bubble`: how long the stages of a pipeline have nothing to do, beside the ideal.

Each stage has a worker. A stage does not compute, it waits for a known time, so that there may be more stages than
cores: what is measured is the schedule and what calls cost, and not the machine. If each of ``p`` stages works for the
same time on each of ``m`` micro-batches, a stage has nothing to do for ``(p - 1) / (m + p - 1)`` of a step, with either
schedule. The measured bubble is the share of a step, as its caller sees it, in which a stage does not work: the mean of
all stages. How long a stage worked is measured there, because a wait takes longer on a busy machine.
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


_worked = 0.0  # seconds, on the worker of a stage


def _work(seconds: float) -> None:
    global _worked
    began = time.perf_counter()
    time.sleep(seconds)
    _worked += time.perf_counter() - began


def _take_worked() -> float:
    global _worked
    taken, _worked = _worked, 0.0
    return taken


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        _work(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _work(BACKWARD)
        return gradient


class _Stage(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = _Wait.apply(x * self.weight)
        return waited


def _bubbles(stages: int, micro_batches: int, schedule: str) -> list[float]:
    """The bubbles of some steps."""
    import farprop
    import farprop.autograd as dist_autograd
    import farprop.rpc as rpc

    workers = [f"w{stage + 1}" for stage in range(stages)]
    pipe = farprop.pipeline([(worker, _Stage) for worker in workers], micro_batches=micro_batches, schedule=schedule)
    x = torch.rand(micro_batches, 64)
    bubbles = []
    for _ in range(1 + STEPS):
        with dist_autograd.context():
            began = time.perf_counter()
            pipe.step(x, x, loss_fn=torch.nn.functional.mse_loss)
            taken = time.perf_counter() - began
        bubbles.append(1 - statistics.mean(rpc.rpc_sync(worker, _take_worked) for worker in workers) / taken)
    return bubbles[1:]  # the first was for imports and the like


def _worker(rank: int, path: str) -> None:
    import logging

    import farprop.rpc as rpc

    logging.disable(logging.WARNING)  # of workers that wait in shutdown
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=120)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=max(STAGES) + 1, rpc_backend_options=options)
    if rank == 0:
        print(
            "| stages | micro-batches | ideal bubble | `1f1b` | `gpipe` |\n| --- | --- | --- | --- | --- |", flush=True
        )
        for stages in STAGES:
            for micro_batches in MICRO_BATCHES:
                measured = [_bubbles(stages, micro_batches, schedule) for schedule in ("1f1b", "gpipe")]
                ideal = (stages - 1) / (micro_batches + stages - 1)
                shown = " | ".join(f"{statistics.median(each):.1%} ({min(each):.1%})" for each in measured)
                print(f"| {stages} | {micro_batches} | {ideal:.1%} | {shown} |", flush=True)
    rpc.shutdown()


def main() -> int:
    print(machine.describe(machine.facts()))
    print(f"A forward waits for {FORWARD * 1e3:.0f} ms, a backward for {BACKWARD * 1e3:.0f} ms.")
    print(f"Bubbles are medians of {STEPS} steps, with the smallest in brackets.")
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_worker, (f"{directory}/store",), nprocs=max(STAGES) + 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
