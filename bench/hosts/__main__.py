"""`python -m bench.hosts`: farprop and torch.distributed between two hosts, on links of given rates and with a delay.

The hosts are network namespaces, so it needs root's permissions, `ip` and `tc` (Debian: iproute2). Both share this
machine's cores.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.driver import ROOT, BenchError, Child, Dormant, Ranks, Site, Workers, start, stop
from bench.hosts.cases import CASES, HOSTS, RANKS, Case
from bench.hosts.network import LINKS, Link, Network
from bench.report import micros, render, times
from bench.rounds import Job, Outcome, Summary, alternate, ratio, round_ratios, rounded
from tests.support.hosts import SECRET, NotAllowedError

ROUNDS = 5
VISIT_SECONDS = 1.0
QUICK_ROUNDS = 2
QUICK_VISIT_SECONDS = 0.1
OUTPUT = ROOT / "build" / "bench-hosts.json"
WIRE = {"ping": "bare TCP, 100 bytes there and back", "echo": "bare TCP, 10 MB there and back"}

# Both packages are told the interface: else they look up this machine's name, which has no address on these hosts.
_COMMON = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "TP_SOCKET_IFNAME": "eth0",
    "FARPROP_SECRET": SECRET,
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns of addresses that have no name
}
SIDES = {
    "farprop": ("farprop", _COMMON),
    "plain": ("farprop", {**_COMMON, "FARPROP_TLS": "0"}),
    "torch": ("torch.distributed", _COMMON),
}


class SlowestRank(Ranks):
    """Ranks whose time for a collective is that of the rank that took longest."""

    def measure(self, case: str, samples: int, warmup: int, seconds: float) -> list[float]:
        del seconds
        return [max(sample) for sample in zip(*self.measure_all(case, samples, warmup), strict=True)]


def sides_of(case: Case) -> list[str]:
    return ["farprop", "plain", "torch"] if case.crossing else ["farprop", "torch"]


def cases_on(link: Link, cases: Sequence[Case]) -> list[Case]:
    """Bulk is not sent over the relay that delays, which has a rate of its own."""
    return [case for case in cases if not (link.delay and case.crossing)]


def jobs_on(link: Link, cases: Sequence[Case], sides: Mapping[tuple[str, int, int], Dormant], wire: Child) -> list[Job]:
    floor = [Job("ping", {"wire": (wire, "ping")}, 200, 20)]
    if not link.delay:
        floor.append(Job("echo", {"wire": (wire, "echo")}, 2, 1))
    return floor + [
        Job(
            case.name,
            {side: (sides[side, case.ranks, case.workers], case.name) for side in sides_of(case)},
            case.samples,
            case.warmup,
        )
        for case in cases_on(link, cases)
    ]


def measure(
    network: Network, links: Sequence[str], cases: Sequence[Case], rounds: int, seconds: float
) -> dict[str, Any]:
    """Run the cases on each link, and print a table for each."""
    address = network.hosts.address(0)
    wire = Child("bench.hosts.wire_side", *network.hosts.names, network.hosts.address(1))
    sides: dict[tuple[str, int, int], Workers | Ranks] = {}
    runs: dict[str, Any] = {}
    try:
        # Before the processes start: a link that changes later keeps their connections.
        network.use(LINKS[links[0]])
        for case in cases:
            for side in sides_of(case):
                package, env = SIDES[side]
                key = side, case.ranks, case.workers
                if key in sides:
                    continue
                count, ranks = case.workers, case.ranks
                places = [rank * HOSTS // ranks for rank in range(ranks)] if ranks else [0] + [1] * (count - 1)
                site = Site("bench.hosts.cases", address, [network.on(host) for host in places])
                sides[key] = SlowestRank(package, RANKS, env, site) if ranks else Workers(package, env, count, site)
        start([[wire], *(side.children for side in sides.values())])
        dormant = {key: Dormant(side) for key, side in sides.items()}
        for name in links:
            link = LINKS[name]
            network.use(link)
            others = machine.Others()
            progress = functools.partial(_before_round, others, name, rounds)
            outcomes = alternate(jobs_on(link, cases, dormant, wire), rounds, seconds, progress)
            print(f"\n{link.label}; {others}")
            print(table(link, cases_on(link, cases), outcomes), flush=True)
            runs[name] = to_json(link, cases_on(link, cases), outcomes)
    finally:
        stop([[wire], *(side.children for side in sides.values())])
    return runs


def table(link: Link, cases: Sequence[Case], outcomes: Mapping[str, Outcome]) -> str:
    header = ["case", "farprop µs", "p99", "torch µs", "p99", "torch/farprop", "rounds", "farprop/wire", "torch/wire"]
    rows = []
    for case in cases:
        outcome = outcomes[case.name]
        theirs = outcome.summaries.get("torch")
        for side in sides_of(case)[:-1]:
            ours = outcome.summaries.get(side)
            label = f"{case.label}, FARPROP_TLS=0" if side == "plain" else case.label
            rows.append(
                [label, *_times(ours), *_times(theirs), *_ratios(theirs, ours), *_over_wire(link, case, ours, theirs)]
            )
    for name, label in WIRE.items():
        if name in outcomes and (floor := outcomes[name].summaries.get("wire")):
            rows.append([label, *_times(floor), *[""] * 6])
    failures = [
        f"{case.name} failed on {side}: {error}" for case in cases for side, error in outcomes[case.name].errors.items()
    ]
    return "\n".join([render(header, rows), *failures])


def _times(summary: Summary | None) -> list[str]:
    return [micros(summary.median), micros(summary.p99)] if summary else ["failed", ""]


def _ratios(theirs: Summary | None, ours: Summary | None) -> list[str]:
    if theirs is None or ours is None:
        return ["", ""]
    each = round_ratios(theirs, ours)
    return [times(ratio(theirs, ours)), f"{times(min(each))} to {times(max(each))}"]


def _over_wire(link: Link, case: Case, *sides: Summary | None) -> list[str]:
    if not case.crossing:
        return ["" for _ in sides]
    return [f"{side.median / link.micros(case.crossing):.2f}" if side else "" for side in sides]


def to_json(link: Link, cases: Sequence[Case], outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    entries = []
    for case in cases:
        outcome = outcomes[case.name]
        entry: dict[str, Any] = {"name": case.name, "label": case.label, "errors": outcome.errors}
        entry |= {side: summary.to_json() for side, summary in outcome.summaries.items()}
        if case.crossing:
            entry["wire_us"] = rounded(link.micros(case.crossing))
        if theirs := outcome.summaries.get("torch"):
            ours = {side: one for side, one in outcome.summaries.items() if side != "torch"}
            entry["ratios"] = {side: rounded(ratio(theirs, one)) for side, one in ours.items()}
        entries.append(entry)
    floor = {name: outcomes[name].summaries["wire"].to_json() for name in WIRE if name in outcomes}
    return {"gigabits": link.gigabits, "delay_seconds": link.delay, "cases": entries, "wire": floor}


def _before_round(others: machine.Others, name: str, rounds: int, number: int) -> None:
    others.sample()
    if sys.stderr.isatty():
        print(f"\r{name}: round {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--link", action="append", choices=list(LINKS), help="this link; may be repeated")
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case; may be repeated")
    parser.add_argument("--rounds", type=int, help=f"visits to each side (default {ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and samples, for a first look")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where to write the JSON (default %(default)s)")
    options = parser.parse_args()
    facts = machine.facts()
    print(machine.describe(facts))
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    try:
        with Network() as network:
            runs = measure(
                network,
                options.link or list(LINKS),
                [CASES[name] for name in options.only or CASES],
                rounds,
                QUICK_VISIT_SECONDS if options.quick else VISIT_SECONDS,
            )
    except NotAllowedError as error:
        print(f"This needs hosts made of network namespaces, so run it as root with iproute2 installed: {error}")
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"machine": facts, "rounds": rounds, "links": runs}, indent=1) + "\n")
    print(f"\nAll numbers: {options.output}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchError as error:
        sys.exit(str(error))
