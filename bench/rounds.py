"""Rounds that alternate between the sides, so that a disturbance of the machine hits all of them.

A *round* is a list of samples (µs per call), taken at once on one side. The statistics of the tables are here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from bench.driver import BenchError, Side


@dataclass(frozen=True)
class Job:
    """One case, and the sides to measure it on."""

    name: str
    sides: Mapping[str, tuple[Side, str]]
    """For each side, the processes that measure, and their name of the case."""
    samples: int
    warmup: int
    calls: int = 1


@dataclass
class Outcome:
    """The times and errors of a job, by side."""

    summaries: dict[str, Summary] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def alternate(jobs: Sequence[Job], rounds: int, seconds: float, progress: Callable[[int], None]) -> dict[str, Outcome]:
    """Measure every job in each round, on every side in turn; the other sides are frozen meanwhile."""
    samples: dict[tuple[str, str], list[list[float]]] = {}
    outcomes = {job.name: Outcome() for job in jobs}
    for number in range(rounds):
        progress(number)
        for job in jobs:
            errors = outcomes[job.name].errors
            for side, (child, case) in job.sides.items():
                if side in errors:
                    continue
                try:
                    measured = child.measure(case, job.samples, job.warmup, seconds)
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


Round = Sequence[float]


def p99(samples: Round) -> float:
    """The nearest-rank 99th percentile. With fewer than 100 samples it is the largest."""
    ordered = sorted(samples)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


@dataclass(frozen=True)
class Summary:
    """One side's times for one case."""

    median: float
    p99: float
    samples: int
    round_medians: list[float]
    round_p99s: list[float]

    def to_json(self) -> dict[str, Any]:
        return {key: rounded(value) for key, value in asdict(self).items()}


def summarise(rounds: Sequence[Round]) -> Summary:
    """Median and p99 over the samples of all rounds, and of each round."""
    everything = [sample for one in rounds for sample in one]
    return Summary(
        median=median(everything),
        p99=p99(everything),
        samples=len(everything),
        round_medians=[median(one) for one in rounds],
        round_p99s=[p99(one) for one in rounds],
    )


def round_ratios(slow: Summary, fast: Summary) -> list[float]:
    """For each round, the ratio of the two sides' medians. They were measured one right after the other."""
    pairs = zip(slow.round_medians, fast.round_medians, strict=True)
    return [theirs / ours for theirs, ours in pairs]


def ratio(slow: Summary, fast: Summary) -> float:
    """The median of the rounds' ratios: a disturbance of a few rounds doesn't move it."""
    return median(round_ratios(slow, fast))


def rounded(value: Any) -> Any:
    """`value` with its floats rounded, for readers of the JSON."""
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
