"""`python -m bench.ddp`: a step of farprop's and torch's DistributedDataParallel on Gloo, in turns in one job."""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from bench import machine

Step = tuple[float, float]  # wall-clock seconds, and CPU seconds of all threads of this rank
ROUNDS = 40
WARM_UP = 6


def _large() -> nn.Module:
    """A model with 33.6 MB of gradients in 16 parameters."""
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])


def _many() -> nn.Module:
    """A model with 0.8 MB of gradients in 400 parameters."""
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(200)])


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "8 layers of 1024×1024": (_large, 1024),
    "200 layers of 32×32": (_many, 32),
}


def _rank(rank: int, size: int, path: str) -> None:
    from farprop.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    for name, (make, width) in MODELS.items():
        for views in (False, True):
            steps = _in_turns(make, width, views, [DistributedDataParallel, nn.parallel.DistributedDataParallel])
            if rank == 0:
                how = "gradients as views" if views else "gradients apart"
                print(
                    f"{size} ranks, {name}, {how}: {_compared('time', steps, 0)}; {_compared('CPU', steps, 1)}",
                    flush=True,
                )
    dist.destroy_process_group()


def _compared(what: str, steps: list[list[Step]], column: int) -> str:
    ours, theirs = ([step[column] for step in side] for side in steps)
    ratio = median(mine / other for mine, other in zip(ours, theirs, strict=True))
    return f"{what} farprop {median(ours) * 1e3:.1f} ms, torch {median(theirs) * 1e3:.1f} ms, ratio {ratio:.3f}"


def _in_turns(make: Callable[[], nn.Module], width: int, views: bool, classes: list[type]) -> list[list[Step]]:
    wrapped = [class_(make(), gradient_as_bucket_view=views) for class_ in classes]
    steps: list[list[Step]] = [[] for _ in classes]
    inputs = torch.randn(8, width)
    for number in range(WARM_UP + ROUNDS):
        # The order alternates, because the first one changes the caches for the second.
        for side in (0, 1) if number % 2 else (1, 0):
            wrapped[side].zero_grad()
            dist.barrier()
            began, used = time.perf_counter(), time.process_time()
            wrapped[side](inputs).sum().backward()
            if number >= WARM_UP:
                steps[side].append((time.perf_counter() - began, time.process_time() - used))
    return steps


def main() -> int:
    print(machine.describe(machine.facts()))
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(_rank, args=(size, f"{directory}/store"), nprocs=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
