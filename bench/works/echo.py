"""Large tensors there and back."""

from __future__ import annotations

import torch

from bench.works import Api, Sample, work


def identity(x: torch.Tensor) -> torch.Tensor:
    return x


@work("echo-1mb", "echo 1 MB", goal=3, samples=100, warmup=20)
def echo_1mb(api: Api, peer: str) -> Sample:
    return _echo(api, peer, megabytes=1)


@work("echo-128mb", "echo 128 MB", goal=5, samples=3, warmup=1)
def echo_128mb(api: Api, peer: str) -> Sample:
    return _echo(api, peer, megabytes=128)


def _echo(api: Api, peer: str, megabytes: int) -> Sample:
    rpc_sync = api.rpc.rpc_sync
    x = torch.arange(megabytes << 18, dtype=torch.float32)
    if not torch.equal(rpc_sync(peer, identity, args=(x,)), x):
        raise AssertionError(f"{api.package} gave back another tensor")
    return lambda: rpc_sync(peer, identity, args=(x,))
