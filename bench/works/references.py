"""Remote references."""

from __future__ import annotations

import torch

from bench.works import Api, Sample, work
from bench.works.calls import add


@work("remote", "remote(...).to_here() of a 3x3 add", goal=4, samples=300, warmup=20)
def remote(api: Api, peer: str) -> Sample:
    make = api.rpc.remote
    a, b = torch.rand(3, 3), torch.rand(3, 3)
    if not torch.equal(make(peer, add, args=(a, b)).to_here(), a + b):
        raise AssertionError(f"{api.package} gave a wrong sum")
    return lambda: make(peer, add, args=(a, b)).to_here()
