"""`python -m bench.passes`: a backward pass compared with torch's engine, and SMART compared with FAST.

Both sides of a comparison are measured in turns, in one process.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp

from bench import machine

NODES = 10_000
GRAPHS = 15
ROUNDS = 11
PASSES = 60


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(NODES):
        x = x * 1.0001
    return x.sum()


def _seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _local_seconds() -> float:
    """Time torch's own backward pass of the same graph in this process."""
    loss = _chain(torch.ones(3, 3, requires_grad=True))
    return _seconds(loss.backward)


def _large_graph(rpc: Any, autograd: Any) -> None:
    ours, local = [], []
    for _ in range(GRAPHS):
        local.append(rpc.rpc_sync("w1", _local_seconds))
        with autograd.context() as context_id:
            loss = rpc.rpc_sync("w1", _chain, args=(torch.ones(3, 3, requires_grad=True),))
            ours.append(_seconds(lambda: autograd.backward(context_id, [loss * 1])))  # noqa: B023
    ratios = [mine / theirs for mine, theirs in zip(ours, local, strict=True)]
    print(
        f"backward of {NODES:,} nodes behind one hop: {median(ours) * 1e3:.1f} ms; torch.autograd.backward of the same "
        f"graph there: {median(local) * 1e3:.1f} ms; ratio {median(ratios):.3f} ({GRAPHS} graphs, in turns)"
    )


def _modes(rpc: Any, autograd: Any, hops: int) -> None:
    a, b = torch.rand(3, 3, requires_grad=True), torch.rand(3, 3, requires_grad=True)
    agent = rpc._get_current_rpc_agent()
    times: dict[str, list[float]] = {"smart": [], "fast": []}
    messages: dict[str, int] = {}
    with autograd.context() as context_id:
        x = a
        for _ in range(hops):
            x = rpc.rpc_sync("w1", torch.add, args=(x, b))
        loss = x.sum()
        for _ in range(ROUNDS):
            for mode, seconds in times.items():
                before = agent.requests_sent + rpc.rpc_sync("w1", _requests_sent)
                samples = [
                    _seconds(lambda: autograd.backward(context_id, [loss], retain_graph=True, mode=mode))  # noqa: B023
                    for _ in range(PASSES)
                ]
                # One of them is the request for this number.
                messages[mode] = (agent.requests_sent + rpc.rpc_sync("w1", _requests_sent) - before - 1) // PASSES
                seconds.append(median(samples))
    ratio = median(smart / fast for smart, fast in zip(times["smart"], times["fast"], strict=True))
    smart, fast = (median(times[mode]) * 1e6 for mode in ("smart", "fast"))
    print(
        f"backward, {hops} hops: SMART {smart:.0f} µs, FAST {fast:.0f} µs, ratio {ratio:.3f} ({ROUNDS} rounds, in "
        f"turns); requests a pass: SMART {messages['smart']}, FAST {messages['fast']}"
    )


def _requests_sent() -> int:
    import farprop.rpc as rpc

    return rpc._get_current_rpc_agent().requests_sent


def _worker(rank: int, path: str) -> None:
    import farprop.autograd as autograd
    import farprop.rpc as rpc

    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for hops in (1, 8):
            _modes(rpc, autograd, hops)
        _large_graph(rpc, autograd)
    rpc.shutdown()


def main() -> int:
    print(machine.describe(machine.facts()))
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_worker, (f"{directory}/store",), nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
