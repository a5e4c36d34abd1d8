"""`python -m bench.peers`: the same work as actor calls on Ray and Monarch, and as calls on farprop."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine, venvs
from bench.cases import CASES
from bench.driver import ROOT, BenchError, Child, Dormant, Side, Workers, start, stop
from bench.report import micros, render, times
from bench.rounds import Job, Outcome, alternate, ratio, round_ratios, rounded

SIDES = {"farprop": "farprop", "torch": "torch.distributed"}
CASE_NAMES = ["empty", "echo-1mb", "echo-128mb", "await", "coroutine-1000", "stream-small", "stream-1mb"]
# Monarch has no streams of an actor's method, and what is awaited are async functions of Ray's actors.
RAY_ONLY = {"await", "coroutine-1000", "stream-small", "stream-1mb"}
WITH_ARRAYS = {"echo-1mb", "echo-128mb", "stream-1mb"}
RESULTS = ROOT / "bench" / "peers-results.json"
ROUNDS = 5
VENVS = ROOT / "build" / "peers"
PACKAGES = {"ray": ["ray"], "monarch": ["torchmonarch"]}
VISIT_SECONDS = 1.0


@dataclass(frozen=True)
class Column:
    """A peer, and the names of its cases where they differ from ours."""

    title: str
    peer: str
    suffix: str = ""

    def case(self, name: str) -> str:
        return name + self.suffix

    def has(self, name: str) -> bool:
        """Whether it has a case: its peer can, and there are arrays if it is about them."""
        return name in WITH_ARRAYS if self.suffix else self.peer == "ray" or name not in RAY_ONLY


COLUMNS = [Column("Ray", "ray"), Column("Ray, NumPy", "ray", ":numpy"), Column("Monarch", "monarch")]


def peer_child(peer: str) -> Child:
    """Start a peer with its own home directory, because peers leave files there, and without usage reports."""
    home = VENVS / "home"
    home.mkdir(parents=True, exist_ok=True)
    python = venvs.python_with(VENVS / peer, PACKAGES[peer])
    env = {
        "HOME": str(home),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{python.parent}:{os.environ.get('PATH', '')}",
    }
    return Child(f"bench.peers.{peer}_side", env=env, python=str(python))


def start_peers() -> tuple[dict[str, Child], dict[str, str]]:
    """Start the peers; return those that run, and why the others don't."""
    running: dict[str, Child] = {}
    missing: dict[str, str] = {}
    for peer in dict.fromkeys(column.peer for column in COLUMNS):
        try:
            child = peer_child(peer)
        except BenchError as error:
            missing[peer] = str(error)
            continue
        try:
            child.wait_ready()
            running[peer] = child
        except BenchError as error:
            missing[peer] = str(error)
            stop([[child]])
    return running, missing


def jobs_for(ours: Side, running: Mapping[str, Child]) -> list[Job]:
    jobs = []
    for name in CASE_NAMES:
        sides: dict[str, tuple[Side, str]] = {"ours": (ours, name)}
        for column in COLUMNS:
            if column.peer in running and column.has(name):
                sides[column.title] = (running[column.peer], column.case(name))
        case = CASES[name]
        jobs.append(Job(name, sides, case.samples, case.warmup, case.calls))
    return jobs


def report(outcomes: Mapping[str, Outcome], ours: str, missing: Mapping[str, str]) -> str:
    header = ["case", f"{ours} µs"]
    for column in COLUMNS:
        header += [f"{column.title} µs", f"over {ours}"]
    rows = []
    for name in CASE_NAMES:
        summaries = outcomes[name].summaries
        mine = summaries.get("ours")
        row = [CASES[name].label, micros(mine.median) if mine else "failed"]
        for column in COLUMNS:
            theirs = summaries.get(column.title)
            if theirs:
                row += [micros(theirs.median), times(ratio(theirs, mine)) if mine else ""]
            elif column.peer in missing:
                row += ["none", ""]
            else:
                row += ["failed" if column.title in outcomes[name].errors else "-", ""]
        rows.append(row)
    notes = [f"{peer}: {reason}" for peer, reason in missing.items()]
    notes += [
        f"{name} failed on {ours if side == 'ours' else side}: {error}"
        for name in CASE_NAMES
        for side, error in outcomes[name].errors.items()
    ]
    return "\n".join([render(header, rows), *notes])


def to_json(outcomes: Mapping[str, Outcome], missing: Mapping[str, str]) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name, outcome in outcomes.items():
        ours = outcome.summaries.get("ours")
        entry: dict[str, Any] = {side: summary.to_json() for side, summary in outcome.summaries.items()}
        if ours:
            for side, summary in outcome.summaries.items():
                if side != "ours":
                    entry[side]["ratio"] = rounded(ratio(summary, ours))
                    entry[side]["round_ratios"] = rounded(round_ratios(summary, ours))
        cases[name] = entry | {"errors": outcome.errors}
    return {"cases": cases, "missing": dict(missing)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--output", type=Path, default=RESULTS, help="where to write the JSON")
    parser.add_argument("--side", default="farprop", choices=list(SIDES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    facts = machine.facts()
    print(machine.describe(facts))
    running, missing = start_peers()
    groups = [[child] for child in running.values()]
    try:
        ours = Workers(SIDES[options.side], {})
        groups.append(ours.children)
        start([ours.children])
        dormant = Dormant(ours)
        others = machine.Others()
        outcomes = alternate(
            jobs_for(dormant, running),
            options.rounds,
            VISIT_SECONDS,
            functools.partial(_before_round, others, options.rounds),
        )
    finally:
        stop(groups)
    print(f"\n{others} (idle peers included)")
    print(report(outcomes, options.side, missing))
    results = {
        "machine": facts,
        "cores_busy_with_other_work": rounded(others.samples),
        "rounds": options.rounds,
        "side": options.side,
        **to_json(outcomes, missing),
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nAll numbers: {options.output}")
    return 0 if not any("ours" in outcome.errors for outcome in outcomes.values()) else 1


def _before_round(others: machine.Others, rounds: int, number: int) -> None:
    others.sample()
    if sys.stderr.isatty():
        print(f"\rround {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
