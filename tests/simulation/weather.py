"""What can go wrong in one run, drawn from its seed."""

from __future__ import annotations

import random
from typing import NamedTuple


class Weather(NamedTuple):
    """Chances and numbers of faults. Each is absent from some runs, so that the others are seen without it."""

    loss: float  # of a batch or a reply
    duplication: float  # of a batch or a reply
    slow: float  # how often a message takes very long
    timeouts: float  # how often a caller gives up early
    unsent: float  # how often a message is never sent
    breaks: int  # connections that break
    partitions: int
    divorces: int
    crashes: int

    @property
    def deadly(self) -> bool:
        return bool(self.crashes or self.divorces)


def draw(chance: random.Random) -> Weather:
    deadly = chance.random() < 0.5
    partitions = chance.choice((0, 0, 1, 2))
    return Weather(
        loss=chance.choice((0.0, 0.1, 0.4)),
        duplication=chance.choice((0.0, 0.1, 0.4)),
        slow=chance.choice((0.0, 0.1, 0.3)),
        timeouts=chance.choice((0.0, 0.1, 0.3)),
        unsent=chance.choice((0.0, 0.0, 0.1)),
        breaks=chance.choice((0, 0, 2, 6)),
        partitions=partitions,
        divorces=chance.choice((0, 1)) if deadly and partitions else 0,
        crashes=chance.choice((1, 1, 2)) if deadly else 0,
    )
