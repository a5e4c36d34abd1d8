"""A job of three processes, one of which fails. Run by ``test_first_failure``: python -m ... KIND DIRECTORY.

What each rank writes goes to DIRECTORY/RANK.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.nn.parallel import DistributedDataParallel

SIZE = 3
FAILS = 2


def step(batch: int) -> None:
    if batch == 3:
        raise ValueError("bad\nbatch")


def wait_long() -> None:
    time.sleep(600)


def _join(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=SIZE)
    rpc.api._all_gather(None)


def call(rank: int) -> None:
    _join(rank)
    if rank == FAILS:
        step(3)
    rpc.rpc_sync(f"worker{FAILS}", wait_long, timeout=0)


def shutdown(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=SIZE)  # nobody is connected
    if rank == FAILS:
        step(3)
    rpc.shutdown()


def in_finally(rank: int) -> None:
    _join(rank)
    try:
        if rank == FAILS:
            step(3)
        rpc.rpc_sync(f"worker{FAILS}", wait_long, timeout=0)
    finally:
        rpc.shutdown(graceful=False)


def collective(rank: int) -> None:
    dist.init_process_group("farprop", rank=rank, world_size=SIZE)
    if rank == FAILS:
        step(3)
    dist.all_reduce(torch.ones(4))


def ddp(rank: int) -> None:
    dist.init_process_group("farprop", rank=rank, world_size=SIZE)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    try:
        for batch in range(5):
            model(torch.ones(2, 4)).sum().backward()
            if rank == FAILS:
                step(batch)
    finally:
        dist.destroy_process_group()


def killed(rank: int) -> None:
    _join(rank)
    if rank == FAILS:
        os.kill(os.getpid(), signal.SIGKILL)
    rpc.rpc_sync(f"worker{FAILS}", wait_long, timeout=0)


def exits(rank: int) -> None:
    _join(rank)
    if rank == FAILS:
        sys.exit(0)
    rpc.rpc_sync(f"worker{FAILS}", wait_long, timeout=0)


def _write_to(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _child(kind: str, rank: int, directory: Path) -> None:
    _write_to(directory / str(rank))
    globals()[kind](rank)


def main() -> None:
    kind, directory = sys.argv[1], Path(sys.argv[2])
    if kind == "child":
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_child, args=("call", rank, directory)) for rank in range(SIZE)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        return
    for rank in range(SIZE):
        if not os.fork():
            _child(kind, rank, directory)
            return
    for _ in range(SIZE):
        os.wait()


if __name__ == "__main__":
    main()
