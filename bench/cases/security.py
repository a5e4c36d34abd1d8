"""What security costs: TCP with TLS against torch and against plain TCP, and restricted mode against pickles.

If both sides are farprop, torch's column has the side without the security feature.
"""

from __future__ import annotations

from bench.cases import Api, Sample, case
from bench.cases.calls import add_python, echo_128mb, empty

TCP = {"FARPROP_TRANSPORT": "tcp"}
PLAIN = {**TCP, "FARPROP_TLS": "0"}


@case("empty-tcp", "empty call over TCP with TLS", goal=3, samples=400, warmup=20, env=TCP, floor="tcp")
def empty_tcp(api: Api, peer: str) -> Sample:
    return empty(api, peer)


@case("empty-tls", "TLS against plain TCP: empty call", goal=1 / 1.3, samples=400, warmup=20, env=TCP, against=PLAIN)
def empty_tls(api: Api, peer: str) -> Sample:
    return empty(api, peer)


# The goal is 0.6 GB/s in each direction, so 427 ms for a round trip; the ratio is for information.
@case("echo-tls", "TLS against plain TCP: echo 128 MB", goal=0.25, samples=3, warmup=1, env=TCP, against=PLAIN)
def echo_tls(api: Api, peer: str) -> Sample:
    return echo_128mb(api, peer)


RESTRICTED = {"FARPROP_RESTRICTED": "1"}


for _name, _label, _prepare in (
    ("restricted-empty", "restricted against pickle: empty call", empty),
    ("restricted-add", "restricted against pickle: two 3x3 tensors", add_python),
):
    case(_name, _label, goal=1 / 1.2, samples=400, warmup=20, env=RESTRICTED, against={})(_prepare)
