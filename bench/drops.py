"""`python -m bench.drops`: how long it takes until an owner has freed 10,000 references that are dropped at once."""

from __future__ import annotations

import sys
import time
from collections import Counter
from statistics import median

import torch
import torch.multiprocessing as mp

from bench import machine

REFERENCES = 10_000
ROUNDS = 5


def _owned() -> int:
    import farprop.rpc as rpc

    return int(rpc.debug_info()["references.num_owner_rrefs"])


def _worker(rank: int, path: str) -> None:
    import farprop.rpc as rpc
    from farprop.testing import inject

    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    rpc.init_rpc(f"w{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        times, batches = [], []
        for _ in range(ROUNDS):
            references = [rpc.remote("w1", torch.zeros, args=(3,)) for _ in range(REFERENCES)]
            references[-1].to_here()
            assert rpc.rpc_sync("w1", _owned) == REFERENCES
            with inject() as plan:
                counted: Counter[str] = plan.counts
                plan.delay(0.0, types=["RREF_USER_DELETE"])  # counts them, and sends them at once
                began = time.perf_counter()
                references.clear()
                while rpc.rpc_sync("w1", _owned):
                    pass
                times.append(time.perf_counter() - began)
            batches.append(sum(counted.values()))
        print(
            f"{REFERENCES:,} references dropped at once: freed at the owner after {median(times) * 1e3:.0f} ms "
            f"({min(times) * 1e3:.0f} to {max(times) * 1e3:.0f} ms in {ROUNDS} rounds), "
            f"in {median(batches):.0f} messages"
        )
    rpc.shutdown()


def main() -> int:
    import tempfile

    print(machine.describe(machine.facts()))
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(_worker, (f"{directory}/store",), nprocs=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
