"""`python -m bench.groups`: all-reduce on the backends farprop and Gloo, in turns, in the same processes."""

from __future__ import annotations

import sys
import tempfile
import time
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench import machine

SIZES = {"4 KB": (4 << 10, 300), "64 KB": (64 << 10, 200), "1 MB": (1 << 20, 60), "25 MB": (25 << 20, 12)}
GOALS = {"4 KB": 2, "1 MB": 3, "25 MB": 3}


def _rank(rank: int, size: int, path: str) -> None:
    import farprop.distributed  # noqa: F401 - it registers the backend

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    groups = {"gloo": dist.group.WORLD, "farprop": dist.new_group(backend="farprop")}
    for name, (length, rounds) in SIZES.items():
        times: dict[str, list[float]] = {backend: [] for backend in groups}
        x = torch.ones(length // 4)
        for number in range(rounds + 3):
            for backend, group in groups.items():
                x.fill_(1)
                dist.barrier(group)
                began = time.perf_counter()
                dist.all_reduce(x, group=group)
                if number >= 3:  # the first ones touch memory for the first time
                    times[backend].append(time.perf_counter() - began)
                assert x[0].item() == size
        if rank == 0:
            ours, theirs = (median(times[backend]) * 1e6 for backend in ("farprop", "gloo"))
            goal = f" (goal: {GOALS[name]})" if name in GOALS else ""
            print(
                f"{size} ranks, {name:>5}: farprop {ours:7.0f} µs, Gloo {theirs:7.0f} µs: {theirs / ours:.1f} ×{goal}"
            )
            sys.stdout.flush()
    dist.destroy_process_group()


def main() -> int:
    print(machine.describe(machine.facts()))
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(_rank, (size, f"{directory}/store"), nprocs=size)
    return 0


if __name__ == "__main__":
    sys.exit(main())
