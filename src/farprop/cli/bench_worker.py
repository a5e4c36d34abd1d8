"""A worker of ``farprop bench``, on one side of the comparison: farprop's, or that of torch.distributed.

Each side has two of them. Rank 0 measures when it is asked: it reads the name of a case and a number of seconds from
its standard input, and writes the samples, in microseconds, as JSON.

Here, and nowhere else, a process of farprop's imports torch's own RPC. It has nothing else of farprop's imported then:
only the names of modules differ between the sides.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from types import ModuleType

import torch

_THREADS = 16
_SET_PARENT_DEATH_SIGNAL = 1
_WARM_UP = 0.2  # of the time for samples


def nothing() -> None:
    """What an empty call runs."""


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def double(tensor: torch.Tensor) -> torch.Tensor:
    return 2 * tensor


def main(package: str, rank: int, port: int) -> None:
    """Join the other worker of this side, and serve.

    Args:
        package: ``farprop`` or ``torch.distributed``.
        rank: 0, which measures, or 1, which is called.
        port: of the store.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no reply
    torch.set_num_threads(1)
    # Torch's own shutdown warns about itself.
    warnings.filterwarnings("ignore", message="You are using a Backend")
    rpc = importlib.import_module(f"{package}.rpc")
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=_THREADS, init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=60
    )
    rpc.init_rpc(f"bench{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    cases = make_cases(rpc, importlib.import_module(f"{package}.autograd"))
    with replies:
        print("ready", file=replies, flush=True)
        for line in sys.stdin:
            name, seconds = line.split()
            print(json.dumps(_timed(cases[name], float(seconds))), file=replies, flush=True)
    rpc.shutdown()


def make_cases(rpc: ModuleType, autograd: ModuleType) -> dict[str, Callable[[], object]]:
    small = torch.ones(4)
    large = torch.ones(2_500_000)
    leaf = torch.ones(16, requires_grad=True)

    def forward_and_backward() -> None:
        with autograd.context() as context:
            loss = rpc.rpc_sync("bench1", double, (leaf,)).sum()
            autograd.backward(context, [loss])

    return {
        "empty": lambda: rpc.rpc_sync("bench1", nothing),
        "small": lambda: rpc.rpc_sync("bench1", torch.add, (small, small)),
        "large": lambda: rpc.rpc_sync("bench1", echo, (large,)),
        "backward": forward_and_backward,
    }


def _timed(sample: Callable[[], object], seconds: float) -> list[float]:
    clock = time.perf_counter
    end = clock() + _WARM_UP * seconds
    while clock() < end:
        sample()
    end = clock() + seconds
    taken: list[float] = []
    while not taken or clock() < end:
        began = clock()
        sample()
        taken.append((clock() - began) * 1e6)
    return taken
