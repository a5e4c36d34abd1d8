"""`python -m bench.peak_memory`: the most memory that a 128 MB echo and a DDP step take, on farprop and on torch.

The peak of two workers together is sampled, with shared memory counted once. That of each worker is the kernel's own,
VmHWM, which misses nothing, but counts shared memory in both. All are beyond what the workers had before they made the
tensor or the model. Nothing else on the machine should use shared memory meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import machine
from bench.cases import Api, Sample
from bench.cases.calls import identity
from bench.driver import ROOT, Ranks, Site, Workers, start, stop
from bench.report import render

PACKAGES = {"farprop": "farprop", "torch": "torch.distributed"}
OUTPUT = ROOT / "build" / "bench-peak-memory.json"
ROUNDS = 3
MIB = 1 << 20


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    label: str
    prepare: Callable[[Api, str], Sample]
    payload: int
    """Bytes of the tensor, or of the gradients."""
    ranks: int = 0
    """The size of the process group; 0 for two workers."""


def echo(size: int) -> Callable[[Api, str], Sample]:
    def prepare(api: Api, peer: str) -> Sample:
        x = torch.zeros(size // 4)
        return lambda: api.rpc.rpc_sync(peer, identity, args=(x,))

    return prepare


def ddp(layers: int) -> Callable[[Api, str], Sample]:
    def prepare(api: Api, _: str) -> Sample:
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(layers)])
        wrapped = api.data_parallel(model, process_group=api.group)
        inputs = torch.randn(8, 1024)

        def step() -> None:
            wrapped(inputs).sum().backward()
            wrapped.zero_grad()

        return step

    return prepare


CASES = {
    case.name: case
    for case in (
        Case("echo", "echo 128 MB", echo(128 * MIB), 128 * MIB),
        Case("ddp", "DDP, 128 MB of gradients", ddp(32), 128 * MIB, ranks=2),
        Case("echo-small", "echo 1 MB", echo(MIB), MIB),
    )
}
MEASURED = ["echo", "ddp"]  # the small one is for a first try


@dataclass
class Peak:
    """KiB beyond what there was before."""

    together: int
    workers: list[int]
    kept: int
    """Together, after the case."""

    def to_json(self) -> dict[str, Any]:
        return {"together_kib": self.together, "workers_kib": self.workers, "kept_kib": self.kept}


@dataclass
class _Sampler:
    """Samples the memory of processes on a thread of its own."""

    pids: Sequence[int]
    most: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self._ended.is_set():
            self.most = max(self.most, machine.together_kib(self.pids))

    def __enter__(self) -> _Sampler:
        self._thread = threading.Thread(target=self.run)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def peak(side: Workers | Ranks, case: Case) -> Peak:
    """Run a case that these processes have not run before."""
    pids = [child.pid for child in side.children]
    before, each = machine.together_kib(pids), [machine.usage(pid).rss_kib for pid in pids]
    for pid in pids:
        machine.reset_peak(pid)
    with _Sampler(pids) as sampler:
        side.measure(case.name, 3, 0, 60.0)
    workers = [machine.peak_kib(pid) - rss for pid, rss in zip(pids, each, strict=True)]
    return Peak(max(sampler.most, before) - before, workers, machine.together_kib(pids) - before)


def measure(package: str, case: Case) -> Peak:
    site = Site("bench.peak_memory")
    side = Ranks(package, case.ranks, {}, site) if case.ranks else Workers(package, {}, site=site)
    try:
        start([side.children])
        return peak(side, case)
    finally:
        stop([side.children])


def row(case: Case, side: str, peaks: Sequence[Peak]) -> list[str]:
    """The largest of the rounds: a sampled peak can only be too small."""
    most = max(peaks, key=lambda one: one.together)
    return [
        f"{case.label}: {side}",
        *(f"{kib / 1024:.0f}" for kib in (most.together, *most.workers, most.kept)),
        f"{most.together * 1024 / case.payload:.1f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peak_memory", description=__doc__)
    parser.add_argument("--only", action="append", choices=list(CASES), help="this case; may be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each side (default %(default)s)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="where to write the JSON (default %(default)s)")
    options = parser.parse_args()
    facts = machine.facts()
    print(machine.describe(facts))
    rows, results = [], {}
    for name in options.only or MEASURED:
        case = CASES[name]
        peaks: dict[str, list[Peak]] = {side: [] for side in PACKAGES}
        for _ in range(options.rounds):
            for side, package in PACKAGES.items():
                peaks[side].append(measure(package, case))
        rows += [row(case, side, seen) for side, seen in peaks.items()]
        results[name] = {side: [one.to_json() for one in seen] for side, seen in peaks.items()}
    print(render(["MiB", "both", "worker 0", "worker 1", "kept", "times the payload"], rows))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"machine": facts, "results": results}, indent=1) + "\n")
    print(f"\nAll numbers: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
