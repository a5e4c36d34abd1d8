"""Farprop kept to TCP: against whatever torch chooses for itself, and encrypted against plain."""

from __future__ import annotations

from bench.works import Api, Sample, work
from bench.works.calls import empty
from bench.works.echo import echo_128mb

TCP = {"FARPROP_TRANSPORT": "tcp"}
PLAIN = {**TCP, "FARPROP_TLS": "0"}


@work("empty-tcp", "empty call over TCP with TLS", goal=3, samples=400, warmup=20, env=TCP, floor="tcp")
def empty_tcp(api: Api, peer: str) -> Sample:
    return empty(api, peer)


@work("empty-tls", "TLS against plain TCP: empty call", goal=1 / 1.3, samples=400, warmup=20, env=TCP, against=PLAIN)
def empty_tls(api: Api, peer: str) -> Sample:
    return empty(api, peer)


# What is asked for is 0.6 GB/s in each direction, so 427 ms there and back; the ratio is for information.
@work("echo-tls", "TLS against plain TCP: echo 128 MB", goal=0.25, samples=3, warmup=1, env=TCP, against=PLAIN)
def echo_tls(api: Api, peer: str) -> Sample:
    return echo_128mb(api, peer)
