"""Calls: small ones, echoes of large tensors, and remote references."""

from __future__ import annotations

import torch

from bench.cases import Api, Sample, case

IN_FLIGHT = 5000


def noop() -> None:
    return None


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(a, b)


@case("empty", "empty Python function, rpc_sync", goal=4, samples=400, warmup=20, floor="unix")
def empty(api: Api, peer: str) -> Sample:
    rpc_sync = api.rpc.rpc_sync
    return lambda: rpc_sync(peer, noop)


@case("add-operator", "torch.add of two 3x3", goal=3, samples=400, warmup=20)
def add_operator(api: Api, peer: str) -> Sample:
    return _on_two_tensors(api, peer, torch.add)


@case("add-python", "Python function on two 3x3 tensors", goal=4, samples=400, warmup=20)
def add_python(api: Api, peer: str) -> Sample:
    return _on_two_tensors(api, peer, add)


@case("in-flight", "5,000 empty rpc_async in flight, a call", goal=6, samples=1, warmup=0, calls=IN_FLIGHT)
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


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


@case("echo-1mb", "echo 1 MB", goal=3, samples=100, warmup=20)
def echo_1mb(api: Api, peer: str) -> Sample:
    return _echo(api, peer, megabytes=1)


@case("echo-128mb", "echo 128 MB", goal=5, samples=3, warmup=1)
def echo_128mb(api: Api, peer: str) -> Sample:
    return _echo(api, peer, megabytes=128)


def _echo(api: Api, peer: str, megabytes: int) -> Sample:
    rpc_sync = api.rpc.rpc_sync
    x = torch.arange(megabytes << 18, dtype=torch.float32)
    if not torch.equal(rpc_sync(peer, identity, args=(x,)), x):
        raise AssertionError(f"{api.package} gave back another tensor")
    return lambda: rpc_sync(peer, identity, args=(x,))


@case("remote", "remote(...).to_here() of a 3x3 add", goal=4, samples=300, warmup=20)
def remote(api: Api, peer: str) -> Sample:
    make = api.rpc.remote
    a, b = torch.rand(3, 3), torch.rand(3, 3)
    if not torch.equal(make(peer, add, args=(a, b)).to_here(), a + b):
        raise AssertionError(f"{api.package} gave a wrong sum")
    return lambda: make(peer, add, args=(a, b)).to_here()
