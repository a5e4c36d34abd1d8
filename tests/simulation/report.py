"""Many runs, and what came of them."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.simulation.kinds import KINDS
from tests.simulation.outcome import Outcome
from tests.simulation.planting import FLAWS, planted

_CHUNK = 50


class Report:
    """The sums over many runs of one kind."""

    def __init__(self, kind: str = "references") -> None:
        self.kind = KINDS[kind]
        self.runs = 0
        self.failed = 0
        self.counts: Counter[str] = Counter()
        self.runs_with: Counter[str] = Counter()

    def add(self, outcome: Outcome) -> None:
        self.runs += 1
        self.failed += outcome.failure is not None
        self.counts.update(outcome.counts)
        self.runs_with.update(outcome.counts.keys())

    def text(self, seconds: float) -> str:
        lines = [f"{self.runs:,} seeds, {self.counts['steps']:,} steps, {seconds:.0f} s: {self.failed:,} failed"]
        lines += [f"{name + ':':12}{self._listed(names)}" for name, names in self.kind.lists.items()]
        if self.kind.kept:
            lines.append(f"{self.kind.kept}: {self.counts['kept ids']:,}")
        lines.append(f"{'faults':20}{'number':>12}{'runs with it':>16}")
        lines += [f"{fault:20}{self.counts[fault]:>12,}{self.runs_with[fault]:>16,}" for fault in self.kind.faults]
        return "\n".join(lines)

    def _listed(self, names: Iterable[str]) -> str:
        return ", ".join(f"{self.counts[name]:,} {name}" for name in names)


def replay(outcome: Outcome, flaw: str | None) -> str:
    """One line that runs a seed again."""
    planting = f" --flaw {flaw}" if flaw else ""
    kind = f" --kind {outcome.kind}" if outcome.kind != kind_of(None, flaw) else ""
    return f"python -m tests.simulation{kind} --seed {outcome.seed}{planting}  # {outcome.failure}"


def kind_of(kind: str | None, flaw: str | None) -> str:
    """The kind of job to run: that which was asked for, or that which the flaw is for."""
    return kind or (FLAWS[flaw].kind if flaw else "references")


def run_all(seeds: range, jobs: int, flaw: str | None, kind: str | None = None) -> Iterator[Outcome]:
    """The outcomes of all seeds, in order."""
    kind = kind_of(kind, flaw)
    if jobs == 1:
        with planted(flaw):
            yield from map(KINDS[kind].run, seeds)
        return
    chunks = [(seeds[start : start + _CHUNK], flaw, kind) for start in range(0, len(seeds), _CHUNK)]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for outcomes in pool.imap(_run_chunk, chunks):
            yield from outcomes


def _run_chunk(chunk: tuple[range, str | None, str]) -> list[Outcome]:
    seeds, flaw, kind = chunk
    return list(run_all(seeds, 1, flaw, kind))
