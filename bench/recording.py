"""`python -m bench.recording`: what an empty call costs while its job is recorded, and what of that the records cost.

Jobs of two workers run side by side, one for each way to record. Batches of calls alternate between them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from multiprocessing.connection import Connection
from statistics import median
from time import perf_counter
from typing import Any

import torch.multiprocessing as mp

from bench import machine

CALLS = 200
BATCHES = 50
WARM_UP = 3
WAYS = {
    "off": "nobody records",
    "calls": "calls recorded",
    "operators": "calls and torch's operators",
    "thrown away": "records made, and thrown away",
    "kept": "records made and kept",
    "no collector": "kept, without the garbage collector",
}


def _empty() -> None:
    pass


def _listen(way: str) -> None:
    import gc

    from farprop.runtime.recorder import recorder

    kept: list[Any] = []
    if way == "thrown away":
        recorder.subscribe_late(lambda record: None)
    elif way in ("kept", "no collector"):
        recorder.subscribe_late(kept.append)
    if way == "no collector":
        gc.disable()


def _worker(rank: int, way: str, path: str, driver: Connection) -> None:
    import farprop
    import farprop.rpc as rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    _listen(way)
    if rank == 1:
        rpc.shutdown()  # serves until the driver has ended the other one
        return
    if way in ("calls", "operators"):
        farprop.profile(operators=way == "operators").__enter__()  # until this process ends
    driver.send(None)
    while driver.recv():
        began = perf_counter()
        for _ in range(CALLS):
            rpc.rpc_sync("w1", _empty)
        driver.send((perf_counter() - began) / CALLS * 1e6)
    os._exit(0)


def main() -> int:
    print(machine.describe(machine.facts()))
    context = mp.get_context("spawn")
    jobs: dict[str, tuple[Any, list[Any]]] = {}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    try:
        for way in WAYS:
            ours, theirs = context.Pipe()
            path = os.path.join(tempfile.mkdtemp(), "meet")
            both = [context.Process(target=_worker, args=(rank, way, path, theirs), daemon=True) for rank in (0, 1)]
            jobs[way] = ours, both
            for process in both:
                process.start()
            ours.recv()
        for batch in range(BATCHES):
            for way, (ours, _) in jobs.items():
                ours.send(True)
                taken = ours.recv()
                if batch >= WARM_UP:
                    times[way].append(taken)
    finally:
        for _, both in jobs.values():
            for process in both:
                process.kill()
    print("an empty call, µs, best and median of the batches, and the median of the ratios")
    for way, text in WAYS.items():
        found = times[way]
        ratio = median(own / base for own, base in zip(found, times["off"], strict=True))
        print(f"{text:36} {min(found):6.1f} {median(found):6.1f} {ratio:6.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
