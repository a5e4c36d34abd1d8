"""`python -m bench`: the same work on farprop and on torch.distributed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import floor_side, machine
from bench.cases import CASES, Case
from bench.driver import ROOT, Child, Dormant, Ranks, Workers, start, stop
from bench.machine import one_busy_core
from bench.report import alone_name, comparison, to_json
from bench.rounds import Job, alternate, rounded

PACKAGES = {"farprop": "farprop", "torch": "torch.distributed"}
ROUNDS = 9
QUICK_ROUNDS = 3
GAP_SAMPLES = 4
# A round on one side ends after this time, even on a slow machine.
VISIT_SECONDS = 1.0
QUICK_VISIT_SECONDS = 0.1
TITLES = {"quiet": "Quiet", "loaded": "Under load (another process burns one core)"}
# Only a full run may replace the committed results, not one with a few cases or few rounds.
FULL_RESULTS = ROOT / "bench" / "results.json"
PARTIAL_RESULTS = ROOT / "build" / "bench-partial.json"


@dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    cases: list[Case]
    conditions: list[str]
    rounds: int
    seconds: float
    ours: str
    theirs: str
    output: Path


def parse(arguments: list[str]) -> Plan:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--quiet", action="store_true", help="only with the machine left alone")
    parser.add_argument("--load", action="store_true", help="only with one core kept busy")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and samples, for a first look")
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case; may be repeated")
    parser.add_argument("--rounds", type=_positive, help=f"visits to each side (default {ROUNDS})")
    parser.add_argument("--output", type=Path, help="where to write the JSON")
    parser.add_argument("--sides", default="farprop,torch", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    ours, _, theirs = options.sides.partition(",")
    if not {ours, theirs} <= set(PACKAGES):
        parser.error(f"--sides takes two of {', '.join(PACKAGES)}")
    both = options.quiet == options.load
    partial = bool(options.quick or options.only or not both or options.sides != "farprop,torch")
    return Plan(
        cases=[CASES[name] for name in CASES if not options.only or name in options.only],
        conditions=["quiet", "loaded"] if both else ["quiet" if options.quiet else "loaded"],
        rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
        seconds=QUICK_VISIT_SECONDS if options.quick else VISIT_SECONDS,
        ours=ours,
        theirs=theirs,
        output=options.output or (PARTIAL_RESULTS if partial else FULL_RESULTS),
    )


def jobs_for(plan: Plan, processes: Mapping[tuple[str, ...], Dormant], floor: Child, alone: Child) -> Iterable[Job]:
    for kind in floor_side.KINDS:
        samples, warmup = (GAP_SAMPLES, 0) if kind in floor_side.WITH_GAPS else (floor_side.SAMPLES, floor_side.WARMUP)
        yield Job(kind, {"floor": (floor, kind)}, samples, warmup)
    for case in plan.cases:
        sides = {side: (processes[_key(side, case)], case.name) for side in ("ours", "theirs")}
        yield Job(case.name, sides, case.samples, case.warmup, case.calls)
        if case.alone is not None:
            yield Job(alone_name(case), {"floor": (alone, case.name)}, case.samples, case.warmup, case.calls)


def main() -> int:
    plan = parse(sys.argv[1:])
    facts = machine.facts()
    print(machine.describe(facts))
    floor, alone = Child("bench.floor_side"), Child("bench.alone_side")
    sides: dict[tuple[str, ...], Workers | Ranks] = {}
    for case in plan.cases:
        for side, name in (("ours", plan.ours), ("theirs", plan.theirs)):
            package, key = _package(side, case, name), _key(side, case)
            if key not in sides:
                sides[key] = (
                    Ranks(package, case.ranks) if case.ranks else Workers(package, _env(side, case), case.workers)
                )
    processes = [[floor, alone], *(side.children for side in sides.values())]
    runs: dict[str, Any] = {}
    failed = False
    try:
        start(processes)
        dormant = {key: Dormant(side) for key, side in sides.items()}
        jobs = list(jobs_for(plan, dormant, floor, alone))
        for condition in plan.conditions:
            # our own busy process runs while other work is measured
            others = machine.Others(ours=1.0 if condition == "loaded" else 0.0)
            busy = one_busy_core() if condition == "loaded" else contextlib.nullcontext()
            with busy:
                outcomes = alternate(
                    jobs,
                    plan.rounds,
                    plan.seconds,
                    functools.partial(_before_round, others, condition, plan.rounds),
                )
            runs[condition] = {
                "cores_busy_with_other_work": rounded(others.samples),
                **to_json(plan.cases, outcomes),
            }
            print(f"\n{TITLES[condition]}; {others}")
            print(comparison(plan.cases, outcomes, plan.ours, plan.theirs))
            failed = failed or any(outcome.errors for outcome in outcomes.values())
    finally:
        stop(processes)
    plan.output.parent.mkdir(parents=True, exist_ok=True)
    results = {"machine": facts, "sides": [plan.ours, plan.theirs], "rounds": plan.rounds, "runs": runs}
    plan.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nAll numbers: {plan.output}")
    return 1 if failed else 0


def _key(side: str, case: Case) -> tuple[str, ...]:
    """Cases with the same key run in the same processes."""
    env = (f"{key}={value}" for key, value in sorted(_env(side, case).items()))
    return side, str(case.ranks), str(case.workers), _package(side, case, side), *env


def _package(side: str, case: Case, name: str) -> str:
    return "farprop" if side == "theirs" and case.against is not None else PACKAGES.get(name, name)


def _env(side: str, case: Case) -> Mapping[str, str]:
    return case.env if side == "ours" else case.against or {}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _before_round(others: machine.Others, condition: str, rounds: int, number: int) -> None:
    others.sample()
    if sys.stderr.isatty():
        print(f"\r{condition}: round {number + 1} of {rounds} ", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
