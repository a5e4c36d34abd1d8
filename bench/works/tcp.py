"""Farprop kept to TCP, against whatever torch chooses for itself."""

from __future__ import annotations

from bench.works import Api, Sample, work
from bench.works.calls import empty

TCP = {"FARPROP_TRANSPORT": "tcp"}


@work("empty-tcp", "empty call over TCP alone", goal=3, samples=400, warmup=20, env=TCP, floor="tcp")
def empty_tcp(api: Api, peer: str) -> Sample:
    return empty(api, peer)
