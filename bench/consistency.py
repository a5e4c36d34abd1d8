"""`python -m bench.consistency`: trainers that step the parameters of one server at the same time.

Each trainer runs a forward pass on the server, thinks for a moment, runs the backward pass, and steps. With each
``consistency``: how many passes a second succeed, and how many fail because another trainer's step came in between.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import torch
import torch.multiprocessing as mp

from bench import machine

TRAINERS = 3
SECONDS = 8.0
THINK = 0.002  # what a trainer computes itself between its passes
WIDTH, BATCH = 256, 32


class _Server:
    def __init__(self) -> None:
        self.layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def references(self) -> list[Any]:
        import farprop.rpc as rpc

        return [rpc.RRef(parameter) for layer in self.layers for parameter in layer.parameters()]


def _train(server: Any, consistency: str, seconds: float) -> tuple[int, int]:
    """Train for a while; returns how many passes have succeeded and failed."""
    import farprop.autograd as dist_autograd
    from farprop.optim import DistributedOptimizer

    torch.set_num_threads(1)
    references = server.rpc_sync().references()
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=1e-4, consistency=consistency)
    x = torch.rand(BATCH, WIDTH)
    good = bad = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with dist_autograd.context() as context_id:
            loss = server.rpc_sync().forward(x).square().mean()
            time.sleep(THINK)
            try:
                dist_autograd.backward(context_id, [loss])
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                bad += 1
                continue
            optimizer.step(context_id)
            good += 1
    return good, bad


def _worker(rank: int, path: str, consistency: str) -> None:
    import logging

    import farprop.rpc as rpc

    logging.disable(logging.WARNING)  # of passes that fail
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=120)
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=TRAINERS + 1, rpc_backend_options=options)
    if rank == 0:
        server = rpc.RRef(_Server())
        for seconds in (1.0, SECONDS):  # the first is for imports and the like
            names = [f"w{trainer}" for trainer in range(1, TRAINERS + 1)]
            calls = [rpc.rpc_async(name, _train, (server, consistency, seconds)) for name in names]
            counts = [call.wait() for call in calls]
        good, bad = (sum(each) for each in zip(*counts, strict=True))
        print(f"| `{consistency}` | {good / SECONDS:.0f} | {bad} of {good + bad} ({bad / (good + bad):.0%}) |")
    rpc.shutdown()


def main() -> int:
    print(machine.describe(machine.facts()))
    print("| consistency | passes a second that succeed | passes that fail |\n| --- | --- | --- |", flush=True)
    for consistency in ("none", "versioned", "locked"):
        with tempfile.TemporaryDirectory() as directory:
            mp.spawn(_worker, (f"{directory}/store", consistency), nprocs=TRAINERS + 1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
