"""The same 50 MB to four workers, and to one of them. torch's RPC has a call for each worker."""

from __future__ import annotations

import torch

from bench.cases import Api, Case, Sample, add_case

WORKERS = [f"w{rank}" for rank in range(1, 5)]
BYTES = 50_000_000


def ends(x: torch.Tensor) -> float:
    return float(x[0] + x[-1])


def to_all(api: Api, workers: list[str]) -> Sample:
    """Send a tensor to workers, and wait until all of them have it."""
    x = torch.ones(BYTES // 4)
    rpc = api.rpc

    def sample() -> list[float]:
        if hasattr(rpc, "broadcast") and len(workers) > 1:
            return list(rpc.gather(rpc.broadcast(workers, ends, args=(x,))).values())
        return list(torch.futures.wait_all([rpc.rpc_async(worker, ends, args=(x,)) for worker in workers]))

    if sample() != [2.0] * len(workers):
        raise AssertionError(f"{api.package} gave a wrong result")
    return sample


def to_four(api: Api, peer: str) -> Sample:
    return to_all(api, WORKERS)


def to_one(api: Api, peer: str) -> Sample:
    return to_all(api, [peer])


add_case(Case("to-one-50mb", "50 MB to one worker", 2, to_one, samples=10, warmup=2, calls=1, workers=5))
add_case(Case("to-four-50mb", "50 MB to four workers", 4, to_four, samples=10, warmup=2, calls=1, workers=5))
