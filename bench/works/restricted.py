"""Restricted mode against pickles: both sides are farprop, in the column of torch's is the one that pickles."""

from __future__ import annotations

from bench.works import Api, Sample, work
from bench.works.calls import add_python, empty

RESTRICTED = {"FARPROP_RESTRICTED": "1"}
GOAL = 1 / 1.2


@work(
    "restricted-empty",
    "restricted against pickle: empty call",
    goal=GOAL,
    samples=400,
    warmup=20,
    env=RESTRICTED,
    against={},
)
def restricted_empty(api: Api, peer: str) -> Sample:
    return empty(api, peer)


@work(
    "restricted-add",
    "restricted against pickle: two 3x3 tensors",
    goal=GOAL,
    samples=400,
    warmup=20,
    env=RESTRICTED,
    against={},
)
def restricted_add(api: Api, peer: str) -> Sample:
    return add_python(api, peer)
