"""What can go wrong in one run, drawn from its seed."""

from __future__ import annotations

import random
from typing import NamedTuple


class Weather(NamedTuple):
    """Chances and numbers of faults. Many runs have none: they show what has to hold then."""

    slow: float  # how often a message or a run takes very long
    breaks: int  # connections that break
    crashes: int
    failing: float  # how often a run raises
    timeouts: float  # how often a call with gradients is given up early

    @property
    def clear(self) -> bool:
        return not (self.breaks or self.crashes or self.failing or self.timeouts)


def draw(chance: random.Random) -> Weather:
    slow = chance.choice((0.0, 0.1, 0.4))
    if chance.random() < 0.35:
        return Weather(slow, 0, 0, 0.0, 0.0)
    return Weather(
        slow=slow,
        breaks=chance.choice((0, 0, 1, 4)),
        crashes=chance.choice((0, 1, 1, 2)),
        failing=chance.choice((0.0, 0.0, 0.0, 0.05)),
        timeouts=chance.choice((0.0, 0.0, 0.0, 0.05)),
    )
