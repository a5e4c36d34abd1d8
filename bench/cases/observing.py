"""What it costs to be looked at: an empty call while somebody records the job, against one that nobody records."""

from __future__ import annotations

import os

from bench.cases import Api, Sample, case
from bench.cases.calls import empty

_RECORDED = "BENCH_RECORDED"


@case(
    "profile-empty",
    "farprop.profile against none: empty call",
    goal=1 / 1.05,
    samples=400,
    warmup=20,
    env={_RECORDED: "1"},
    against={},
)
def profile_empty(api: Api, peer: str) -> Sample:
    if os.environ.get(_RECORDED):
        import farprop

        farprop.profile().__enter__()  # until this process ends
    return empty(api, peer)
