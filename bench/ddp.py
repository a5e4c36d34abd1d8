"""`python -m bench.ddp`: a step of DistributedDataParallel on Gloo, farprop's and torch's, in turns in one job."""

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

ROUNDS = 40
WARM_UP = 6


def _large() -> nn.Module:
    """33.6 MB of gradients in 16 parameters."""
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])


def _many() -> nn.Module:
    """1.7 MB of gradients in 400 parameters."""
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
            seconds = _in_turns(make, width, views, [DistributedDataParallel, nn.parallel.DistributedDataParallel])
            ratios = [mine / theirs for mine, theirs in zip(*seconds, strict=True)]
            if rank == 0:
                how = "gradients as views" if views else "gradients apart"
                print(
                    f"{size} ranks, {name}, {how}: farprop {median(seconds[0]) * 1e3:.1f} ms, torch "
                    f"{median(seconds[1]) * 1e3:.1f} ms, ratio {median(ratios):.3f} ({len(ratios)} pairs)",
                    flush=True,
                )
    dist.destroy_process_group()


def _in_turns(make: Callable[[], nn.Module], width: int, views: bool, classes: list[type]) -> list[list[float]]:
    wrapped = [class_(make(), gradient_as_bucket_view=views) for class_ in classes]
    seconds: list[list[float]] = [[] for _ in classes]
    inputs = torch.randn(8, width)
    for number in range(WARM_UP + ROUNDS):
        # Who is first changes, because the second finds warmer caches, or busier ones.
        for side in (0, 1) if number % 2 else (1, 0):
            wrapped[side].zero_grad()
            dist.barrier()
            began = time.perf_counter()
            wrapped[side](inputs).sum().backward()
            if number >= WARM_UP:
                seconds[side].append(time.perf_counter() - began)
    return seconds


def main() -> int:
    print(machine.describe(machine.facts()))
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(_rank, args=(size, f"{directory}/store"), nprocs=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
