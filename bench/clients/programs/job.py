"""What the programs have in common: they start worker processes, and print a line with the results."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp

RESULT = "RESULT "


class Clock:
    """Measures the loop only, without `init_rpc` and `shutdown`."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def read(self) -> float:
        return time.perf_counter() - self._began


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def options(port: int) -> Any:
    return rpc.TensorPipeRpcBackendOptions(num_worker_threads=32, init_method=f"tcp://127.0.0.1:{port}")


def tiny() -> bool:
    """Whether to use the smallest sizes, to check only that the program runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    return bool(parser.parse_args().tiny)


def report(seconds: float, values: Any) -> None:
    print(RESULT + json.dumps({"seconds": seconds, "values": values}), flush=True)


def run(run_worker: Callable[..., tuple[float, Any] | None], names: Sequence[str], *args: Any) -> None:
    """Run ``run_worker(rank, *args)`` on workers of these names. The first returns the result: seconds, and values."""
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    port = free_port()
    workers = [
        context.Process(target=_worker, args=(rank, port, results, run_worker, list(names), args), daemon=True)
        for rank in range(len(names))
    ]
    for worker in workers:
        worker.start()
    waiting = list(workers)
    while waiting:
        for worker in list(waiting):
            worker.join(0.05)
            if worker.exitcode is None:
                continue
            if worker.exitcode:
                sys.exit(f"a worker ended with exit code {worker.exitcode}")
            waiting.remove(worker)
    report(*results.get())


def _worker(
    rank: int, port: int, results: Any, run_worker: Callable[..., Any], names: Sequence[str], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options(port))
    result = run_worker(rank, *args)
    rpc.shutdown()
    if rank == 0:
        results.put(result)
