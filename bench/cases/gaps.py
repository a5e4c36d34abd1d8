"""What a call costs beyond the work of its function when the program computes between two calls.

A loop of empty calls hides it: there both sides spin, and nobody sleeps. Here the program works for 0.2, 1 and 3 ms
between calls, and the function for 0, 0.2 and 1 ms. The figure is the geometric mean of these nine, each a median.
"""

from __future__ import annotations

import time

import torch

from bench.cases import Api, Sample, case
from bench.with_gaps import sample_of

_clock = time.perf_counter
_matrix = torch.full((24, 24), 1 / 24)


def work(seconds: float) -> None:
    """Compute for this time."""
    end = _clock() + seconds
    while _clock() < end:
        torch.mm(_matrix, _matrix)


@case("gaps-sync", "call with gaps and work: rpc_sync", goal=4, samples=4, warmup=0, floor="unix-gaps")
def sync(api: Api, peer: str) -> Sample:
    rpc_sync = api.rpc.rpc_sync
    return sample_of(lambda seconds: rpc_sync(peer, work, args=(seconds,)), work)


@case("gaps-async", "call with gaps and work: rpc_async(...).wait()", goal=3.5, samples=4, warmup=0, floor="unix-gaps")
def asynchronous(api: Api, peer: str) -> Sample:
    rpc_async = api.rpc.rpc_async
    return sample_of(lambda seconds: rpc_async(peer, work, args=(seconds,)).wait(), work)


@case("gaps-self", "call with gaps and work: to oneself", goal=8, samples=4, warmup=0, floor="thread-gaps")
def to_itself(api: Api, _: str) -> Sample:
    rpc_sync, own = api.rpc.rpc_sync, api.rpc.get_worker_info().name
    return sample_of(lambda seconds: rpc_sync(own, work, args=(seconds,)), work)
