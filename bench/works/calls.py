"""Small calls: what a call costs when nothing heavy is in it."""

from __future__ import annotations

import torch

from bench.works import Api, Sample, work

IN_FLIGHT = 5000


def noop() -> None:
    return None


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(a, b)


@work("empty", "empty Python function, rpc_sync", goal=4, samples=400, warmup=20, floor="unix")
def empty(api: Api, peer: str) -> Sample:
    rpc_sync = api.rpc.rpc_sync
    return lambda: rpc_sync(peer, noop)


@work("add-operator", "torch.add of two 3x3", goal=3, samples=400, warmup=20)
def add_operator(api: Api, peer: str) -> Sample:
    return _on_two_tensors(api, peer, torch.add)


@work("add-python", "Python function on two 3x3 tensors", goal=4, samples=400, warmup=20)
def add_python(api: Api, peer: str) -> Sample:
    return _on_two_tensors(api, peer, add)


@work("in-flight", "5,000 empty rpc_async in flight, a call", goal=6, samples=1, warmup=0, calls=IN_FLIGHT)
def in_flight(api: Api, peer: str) -> Sample:
    rpc_async = api.rpc.rpc_async

    def sample() -> None:
        torch.futures.wait_all([rpc_async(peer, noop) for _ in range(IN_FLIGHT)])

    return sample


def _on_two_tensors(api: Api, peer: str, function: object) -> Sample:
    rpc_sync = api.rpc.rpc_sync
    a, b = torch.rand(3, 3), torch.rand(3, 3)
    if not torch.equal(rpc_sync(peer, function, args=(a, b)), a + b):
        raise AssertionError(f"{api.package} gave a wrong sum")
    return lambda: rpc_sync(peer, function, args=(a, b))
