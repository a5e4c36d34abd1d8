"""Steps of a DistributedOptimizer."""

from __future__ import annotations

import time
from typing import Any

import torch

from bench.cases import Api, Sample, case
from bench.channel import Measured

SHAPE = (16, 16)


def make_parameter() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(SHAPE))


def alone() -> Sample:
    """The two optimisers of the step, in one process."""
    optimizers = []
    for _ in range(2):
        parameter = make_parameter()
        parameter.grad = torch.ones(SHAPE)
        optimizers.append(torch.optim.SGD([parameter], lr=0.01))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def product(theirs: Any, ours: torch.Tensor) -> torch.Tensor:
    return theirs.local_value() * ours


@case("opt-step", "opt.step of two workers' SGD", goal=2.5, samples=150, warmup=20, floor="unix", alone=alone)
def opt_step(api: Api, peer: str) -> Sample:
    rpc, autograd = api.rpc, api.autograd
    ours, theirs = make_parameter(), rpc.remote(peer, make_parameter)
    optimizer = api.optim.DistributedOptimizer(torch.optim.SGD, [theirs, rpc.RRef(ours)], lr=0.001)

    def sample() -> Measured:
        with autograd.context() as context:
            autograd.backward(context, [rpc.rpc_sync(peer, product, args=(theirs, ours.mul(1.0))).sum()])
            began = time.perf_counter()
            optimizer.step(context)
            return Measured((time.perf_counter() - began) * 1e6)

    sample()
    for parameter in (ours, theirs.to_here()):
        if not torch.allclose(parameter.detach(), torch.full(SHAPE, 0.999)):
            raise AssertionError(f"{api.package} made a wrong step")
    return sample
