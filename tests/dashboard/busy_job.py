"""A job to look at: two trainers, a pipeline of two stages, and a parameter server. It trains until
it is told to stop.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc

NAMES = ("trainer0", "trainer1", "stage0", "stage1", "params")

stop = threading.Event()
released = threading.Event()
weights: dict[str, torch.Tensor] = {}
held: list[rpc.RRef[Any]] = []
_layers: list[torch.nn.Linear] = []


def join(rank: int) -> None:
    """Become a worker of the job."""
    torch.set_num_threads(1)
    # A long timeout: what hangs here hangs as long as a test takes.
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=600)
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)


def leave() -> None:
    rpc.shutdown()


def end() -> None:
    """End the training on this worker, and what hangs here."""
    stop.set()
    released.set()


def forward(x: torch.Tensor) -> torch.Tensor:
    """A stage of the pipeline."""
    if not _layers:
        torch.manual_seed(0)
        _layers.append(torch.nn.Linear(256, 256))
    for _ in range(4):
        x = torch.relu(_layers[0](x))
    return x


def push_gradient(name: str, gradient: torch.Tensor) -> None:
    weights[name] = weights.get(name, torch.zeros_like(gradient)) - 0.01 * gradient


def pull_weights(name: str) -> torch.Tensor:
    return weights.get(name, torch.zeros(256))


def load_shard(index: int) -> torch.Tensor:
    if index % 40 == 17:
        raise FileNotFoundError(f"shard-{index}.pt")
    return torch.randn(32, 256)


def save_checkpoint() -> None:
    """Hangs, until somebody ends it."""
    released.wait()


def embedding(rows: int) -> torch.Tensor:
    return torch.zeros(rows, 64)


def train(own: str, steps: int | None = None) -> int:
    """Train until ``end`` or for so many steps."""
    held.extend(rpc.remote(to, embedding, args=(rows,)) for to, rows in (("params", 20_000), ("stage1", 3_000)))
    done = 0
    while not stop.is_set() and done != steps:
        try:
            x = rpc.rpc_sync("params", load_shard, args=(done,))
        except FileNotFoundError:
            done += 1
            continue
        with dist_autograd.context() as context:
            for stage in ("stage0", "stage1"):
                x = rpc.rpc_sync(stage, forward, args=(x.requires_grad_(),))
            dist_autograd.backward(context, [x.sum()])
        pending = [rpc.rpc_async("params", push_gradient, args=(f"{own}.{i}", torch.ones(256))) for i in range(4)]
        for future in pending:
            future.wait()
        for i in range(4):
            rpc.rpc_sync("params", pull_weights, args=(f"{own}.{i}",))
        stop.wait(0.04)  # it shares the machine with a browser
        done += 1
    held.clear()
    return done


def hang() -> None:
    rpc.rpc_sync("params", save_checkpoint)


def hang_in_backward() -> None:
    with dist_autograd.context() as context:
        x = rpc.rpc_sync("stage1", forward_and_hold, args=(torch.ones(4, requires_grad=True),))
        dist_autograd.backward(context, [x.sum()])


def forward_and_hold(x: torch.Tensor) -> torch.Tensor:
    """The gradient of this stays here, until somebody ends it."""

    def hold(gradient: torch.Tensor) -> None:
        released.wait()

    x.register_hook(hold)
    return x * 2
