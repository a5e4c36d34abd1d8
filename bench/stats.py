"""The arithmetic of the tables. A *round* is the list of samples (µs a call) of one visit to one side."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

Round = Sequence[float]


def p99(samples: Round) -> float:
    """The nearest-rank 99th percentile; with fewer than 100 samples that is the largest."""
    ordered = sorted(samples)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


@dataclass(frozen=True)
class Summary:
    """One side's times for one work."""

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
    """For each round the ratio of the two sides' medians; the two were measured one right after the other."""
    pairs = zip(slow.round_medians, fast.round_medians, strict=True)
    return [theirs / ours for theirs, ours in pairs]


def ratio(slow: Summary, fast: Summary) -> float:
    """The median of the rounds' ratios, which a disturbance of a few rounds doesn't move."""
    return median(round_ratios(slow, fast))


def rounded(value: Any) -> Any:
    """`value` with its floats cut to what a reader of the JSON can use."""
    if isinstance(value, float):
        return round(value, 2)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value
