"""`python -m bench.scaling`: calls, memory, descriptors, threads and start-up of 2 to 64 workers on this machine.

Farprop and torch take turns; a job of one ends before the other's begins. Workers are forks of one process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench import machine
from bench.driver import ROOT, BenchError
from bench.report import micros, render
from bench.rounds import p99, rounded
from bench.scaling.plot import Panel, draw
from bench.scaling.workers import Workers, idle_fork

PACKAGES = {"farprop": "farprop", "torch": "torch.distributed"}
SIZES = [2, 4, 8, 16, 32, 64]
# 40 workers of torch that start at once never answered on 2 cores.
LARGEST_JOB = {"farprop": 64, "torch": 32}
# Above this, there is no all-to-all: after one, 32 workers of torch would have 16 GB.
LARGEST_MESH = {"farprop": 64, "torch": 16}
MESH_CALLS = 1000  # of all workers, about
ROUNDS = 3
ROUND_ROBIN_SECONDS = 0.5
RING_CALLS = 20
OUTPUT = ROOT / "build" / "bench-scaling.json"
PLOT = ROOT / "docs" / "scaling.svg"


@dataclass(frozen=True)
class Figures:
    """What one job showed. Figures of a worker are means over all of them; None where they were not measured."""

    startup_seconds: float
    call_us: float
    call_p99_us: float
    ring_us: float
    all_to_all_us: float | None
    """The time of a round, over its calls."""
    idle_mib: float
    idle_fds: float
    idle_threads: float
    used_mib: float | None
    """After an all-to-all, as the next two."""
    used_fds: float | None
    used_threads: float | None


LABELS = {
    "startup_seconds": "start-up, s",
    "call_us": "call, round robin, µs",
    "call_p99_us": "its p99, µs",
    "ring_us": "call, ring, µs",
    "all_to_all_us": "call, all-to-all, µs",
    "idle_mib": "memory a worker, idle, MiB",
    "used_mib": "memory a worker, used, MiB",
    "idle_fds": "descriptors a worker, idle",
    "used_fds": "descriptors a worker, used",
    "idle_threads": "threads a worker, idle",
    "used_threads": "threads a worker, used",
}


def measure(side: str, size: int, round_robin_seconds: float) -> Figures:
    """Start a job of so many workers, measure, and stop it."""
    with idle_fork() as idle:
        workers = Workers(PACKAGES[side], size)
        try:
            startup = workers.begin()
            at_first = _resources(workers.pids, idle)
            calls = workers.first("round_robin", round_robin_seconds)
            ring = [taken for each in workers.all("ring", RING_CALLS) for taken in each]
            mesh, at_last = None, None
            if size <= LARGEST_MESH[side]:
                workers.all("all_to_all", 1)  # connects
                calls_a_round = size * (size - 1)
                rounds = max(2, min(100, MESH_CALLS // calls_a_round))
                mesh = max(workers.all("all_to_all", rounds)) / (rounds * calls_a_round)
                at_last = _resources(workers.pids, idle)
        finally:
            workers.stop()
    used = at_last or (None, None, None)
    return Figures(startup, median(calls), p99(calls), median(ring), mesh, *at_first, *used)


def _resources(pids: Sequence[int], idle: int) -> tuple[float, float, float]:
    """MiB beyond a process that has only imported torch, descriptors, and threads; of a worker on average."""
    base = machine.own_kib(idle)
    return (
        mean(machine.own_kib(pid) - base for pid in pids) / 1024,
        mean(machine.usage(pid).fds for pid in pids),
        mean(machine.threads(pid) for pid in pids),
    )


Results = dict[str, dict[int, Figures]]  # by side, then by number of workers


def combined(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure."""
    values: dict[str, Any] = {}
    for field in fields(Figures):
        seen = [value for one in rounds if (value := getattr(one, field.name)) is not None]
        values[field.name] = median(seen) if seen else None
    return Figures(**values)


def growth(by_size: Mapping[int, Figures], name: str) -> float | None:
    """The exponent with which a figure grew between the two largest sizes that have it: 1 is linear."""
    known = [(size, value) for size, one in sorted(by_size.items()) if (value := getattr(one, name)) is not None]
    if len(known) < 2:
        return None
    (small, before), (large, after) = known[-2:]
    if before <= 0 or after <= 0:
        return None
    return math.log(after / before) / math.log(large / small)


def table(results: Results) -> str:
    sizes = sorted({size for by_size in results.values() for size in by_size})
    header = ["", *(f"{size}" for size in sizes), "exponent"]
    rows = []
    for name, label in LABELS.items():
        for side, by_size in results.items():
            cells = [_cell(name, by_size.get(size)) for size in sizes]
            exponent = growth(by_size, name)
            rows.append([f"{label}: {side}", *cells, "" if exponent is None else f"{exponent:.1f}"])
    return render(header, rows)


def _cell(name: str, figures: Figures | None) -> str:
    value = None if figures is None else getattr(figures, name)
    if value is None:
        return "-"
    if name.endswith("_us"):
        return micros(value)
    return f"{value:.2f}" if name == "startup_seconds" else f"{value:.1f}"


PANELS = ["startup_seconds", "call_us", "all_to_all_us", "used_mib", "used_fds", "used_threads"]


def plot(results: Results) -> str:
    panels = []
    for name in PANELS:
        lines = {
            side: [(size, value) for size, one in sorted(by_size.items()) if (value := getattr(one, name)) is not None]
            for side, by_size in results.items()
        }
        panels.append(Panel(LABELS[name], lines))
    return draw(panels)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of workers (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="jobs of each size and side (default %(default)s)")
    parser.add_argument("--side", action="append", choices=list(PACKAGES), help="only this side")
    parser.add_argument("--seconds", type=float, default=ROUND_ROBIN_SECONDS, help="of calls in turn (%(default)s)")
    parser.add_argument("--merge", action="store_true", help="keep what the output has for other sizes and sides")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where to write the JSON (default %(default)s)")
    parser.add_argument("--plot", type=Path, default=PLOT, help="where to draw (default %(default)s)")
    options = parser.parse_args()
    facts = machine.facts()
    print(machine.describe(facts))
    if not machine.leave_network():
        print("Without root's permissions, start-up includes what the name server takes to answer torch's TCPStore.")
    seen: dict[tuple[str, int], list[Figures]] = {}
    failures: dict[tuple[str, int], str] = {}
    for size in options.sizes:
        for _ in range(options.rounds):
            for side in options.side or PACKAGES:
                if (side, size) in failures or size > LARGEST_JOB[side]:
                    continue
                try:
                    seen.setdefault((side, size), []).append(measure(side, size, options.seconds))
                except BenchError as error:
                    failures[side, size] = str(error)
    results: Results = {side: {} for side in PACKAGES}
    if options.merge and options.output.exists():
        for side, by_size in json.loads(options.output.read_text())["results"].items():
            results[side] = {int(size): Figures(**figures) for size, figures in by_size.items()}
    for (side, size), rounds in seen.items():
        results[side][size] = combined(rounds)
    print("\nMedians; the exponent is that of the growth between the two largest numbers of workers (1 is linear)")
    print(table(results))
    for (side, size), failure in failures.items():
        print(f"{size} workers of {side}: {failure}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    entries = {
        side: {size: {key: rounded(value) for key, value in vars(one).items()} for size, one in by_size.items()}
        for side, by_size in results.items()
    }
    options.output.write_text(json.dumps({"machine": facts, "results": entries}, indent=1) + "\n")
    options.plot.write_text(plot(results))
    print(f"\nAll numbers: {options.output}; drawn in {options.plot}")
    return 1 if failures else 0


if __name__ == "__main__":
    # c10d warns of addresses that have no name. It reads this when torch is imported, so begin again.
    if "TORCH_CPP_LOG_LEVEL" not in os.environ:
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
        os.execv(sys.executable, [sys.executable, "-m", "bench.scaling", *sys.argv[1:]])
    sys.exit(main())
