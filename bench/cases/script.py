"""Calls from compiled code."""

from __future__ import annotations

import importlib

import torch

from bench.cases import Api, Sample, case

CALLS = 20


# Compiled on both workers.
@torch.jit.script
def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.add(a, b)


def _alone() -> Sample:
    a, b = torch.rand(3, 3), torch.rand(3, 3)

    def add_in_a_loop(a: torch.Tensor, b: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            a = add(a, b)
        return a

    compiled = torch.jit.script(add_in_a_loop)
    return lambda: compiled(a, b, CALLS)


@case(
    "script-add",
    "TorchScript: remote add of two 3x3 in a loop",
    goal=3,
    samples=40,
    warmup=3,
    calls=CALLS,
    floor="unix",
    alone=_alone,
)
def script_add(api: Api, peer: str) -> Sample:
    rpc = api.rpc
    if api.package == "farprop":
        importlib.import_module("farprop.jit")

    def add_in_a_loop(peer: str, a: torch.Tensor, b: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            a = rpc.rpc_sync(peer, add, (a, b))
        return a

    compiled = torch.jit.script(add_in_a_loop)
    a, b = torch.rand(3, 3), torch.rand(3, 3)
    if not torch.allclose(compiled(peer, a, b, CALLS), a + CALLS * b):
        raise AssertionError(f"{api.package} gave a wrong sum")
    return lambda: compiled(peer, a, b, CALLS)
