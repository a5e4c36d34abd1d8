"""What can go wrong in one run, drawn from its seed."""

from __future__ import annotations

import random
from typing import NamedTuple


class Weather(NamedTuple):
    """Chances and numbers of faults. Each is absent from some runs, so that the others are seen without it."""

    loss: float  # of a batch or a reply
    duplication: float  # of a batch or a reply
    slow: float  # how often a message takes very long
    late: float  # how often a call that makes a value takes very long, so that references to the value overtake it
    timeouts: float  # how often a caller gives up early
    unsent: float  # how often a message is never sent
    breaks: int  # connections that break
    partitions: int
    divorces: int
    crashes: int
    haste: float  # how often a program passes on at once what it has just got


def draw(chance: random.Random) -> Weather:
    deadly = chance.random() < 0.6
    partitions = chance.choice((0, 0, 1, 2))
    divorces = chance.choice((0, 1, 2)) if deadly and partitions else 0
    return Weather(
        loss=chance.choice((0.0, 0.1, 0.4)),
        duplication=chance.choice((0.0, 0.1, 0.4)),
        slow=chance.choice((0.0, 0.1, 0.5)),
        late=chance.choice((0.0, 0.7)),
        timeouts=chance.choice((0.0, 0.1, 0.3)),
        unsent=chance.choice((0.0, 0.0, 0.1)),
        breaks=chance.choice((0, 0, 2, 6)),
        partitions=partitions,
        divorces=divorces,
        crashes=chance.choice((0, 1)) if divorces else chance.choice((1, 2, 3)) if deadly else 0,
        haste=chance.choice((0.0, 0.5, 0.8, 0.8)),
    )
