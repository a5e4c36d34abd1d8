"""Many runs, and what came of them."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator

from tests.simulation.flaws import planted
from tests.simulation.world import Outcome, run

_CHUNK = 50
_MESSAGES = ("calls", "answers", "forks", "batches", "replies")
_OPERATIONS = ("REGISTER", "ACCEPT", "DELETE", "FORGO", "REVOKE", "RECALL")
_FAULTS = (
    "lost messages",
    "doubled messages",
    "timeouts",
    "unsent messages",
    "interrupted sends",
    "broken connections",
    "partitions",
    "divorces",
    "crashes",
)


class Report:
    """The sums over many runs."""

    def __init__(self) -> None:
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
        lines = [
            f"{self.runs:,} seeds, {self.counts['steps']:,} steps, {seconds:.0f} s: {self.failed:,} failed",
            "messages:   " + self._listed(_MESSAGES),
            "operations: " + self._listed(_OPERATIONS),
            f"ids that the workers keep until somebody dies: {self.counts['kept ids']:,}",
            f"{'faults':20}{'number':>12}{'runs with it':>16}",
        ]
        lines += [f"{fault:20}{self.counts[fault]:>12,}{self.runs_with[fault]:>16,}" for fault in _FAULTS]
        return "\n".join(lines)

    def _listed(self, names: Iterable[str]) -> str:
        return ", ".join(f"{self.counts[name]:,} {name}" for name in names)


def replay(outcome: Outcome, flaw: str | None) -> str:
    """One line that runs a seed again."""
    planting = f" --flaw {flaw}" if flaw else ""
    return f"python -m tests.simulation --seed {outcome.seed}{planting}  # {outcome.failure}"


def run_all(seeds: range, jobs: int, flaw: str | None) -> Iterator[Outcome]:
    """The outcomes of all seeds, in order."""
    if jobs == 1:
        with planted(flaw):
            yield from map(run, seeds)
        return
    chunks = [(seeds[start : start + _CHUNK], flaw) for start in range(0, len(seeds), _CHUNK)]
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for outcomes in pool.imap(_run_chunk, chunks):
            yield from outcomes


def _run_chunk(chunk: tuple[range, str | None]) -> list[Outcome]:
    seeds, flaw = chunk
    return list(run_all(seeds, 1, flaw))
