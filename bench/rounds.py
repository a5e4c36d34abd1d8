"""Rounds that alternate between the sides, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.driver import BenchError, Side
from bench.stats import Summary, summarise


@dataclass(frozen=True)
class Job:
    """One work on several sides: what to ask each of them for."""

    name: str
    sides: Mapping[str, tuple[Side, str]]
    """For each side, whom to ask and for which work."""
    samples: int
    warmup: int
    calls: int = 1


@dataclass
class Outcome:
    """What became of a job, a side at a time."""

    summaries: dict[str, Summary] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def alternate(jobs: Sequence[Job], rounds: int, seconds: float, progress: Callable[[int], None]) -> dict[str, Outcome]:
    """Each round visits every job, and in it every side in turn; the others are still."""
    samples: dict[tuple[str, str], list[list[float]]] = {}
    outcomes = {job.name: Outcome() for job in jobs}
    for number in range(rounds):
        progress(number)
        for job in jobs:
            errors = outcomes[job.name].errors
            for side, (child, work) in job.sides.items():
                if side in errors:
                    continue
                try:
                    measured = child.measure(work, job.samples, job.warmup, seconds)
                except BenchError as error:
                    errors[side] = str(error)
                else:
                    a_call = [sample / job.calls for sample in measured]
                    samples.setdefault((job.name, side), []).append(a_call)
    for job in jobs:
        outcome = outcomes[job.name]
        for side in job.sides:
            if side not in outcome.errors:
                outcome.summaries[side] = summarise(samples[job.name, side])
    return outcomes
