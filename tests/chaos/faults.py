"""The faults: which errors each explains, and when and whom it hits."""

from __future__ import annotations

import random
from dataclasses import dataclass

from farprop.errors import CollectiveError, ConnectionLostError, RpcTimeoutError

FAULTS: dict[str, tuple[type[BaseException], ...]] = {
    "none": (),
    "kill": (ConnectionLostError,),
    "stop": (RpcTimeoutError,),
    "interrupt": (ConnectionLostError, CollectiveError),
    "restart": (ConnectionLostError,),
    "flood": (),
    "no-shm": (),
}

_FIRST = 0.3  # seconds after the start of the job
_GAP = 0.5


@dataclass(frozen=True)
class Event:
    """Something that the driver does to a worker."""

    at: float  # seconds after the start of the job; 0: before it joins
    rank: int
    seconds: float = 0.0  # how long a stop lasts, or until the successor of a killed worker starts
    target: int = -1  # of a flood
    calls: int = 0  # of a flood


def draw_events(fault: str, size: int, seconds: float, dice: random.Random) -> list[Event]:
    """The schedule of a scenario: events that follow each other in the time that the job runs."""
    if fault == "none":
        return []
    first = dice.uniform(_FIRST, seconds / 2)
    rank = dice.randrange(size)
    if fault == "kill":
        return [Event(first, rank)]
    if fault == "restart":
        return [Event(first, rank, dice.choice((0.0, dice.uniform(0.0, 1.0))))]
    if fault == "flood":
        target = dice.choice([other for other in range(size) if other != rank])
        return [Event(first, rank, target=target, calls=dice.randrange(1000, 8000))]
    if fault == "no-shm":
        ranks = dice.sample(range(size), dice.randint(1, size))
        return [Event(dice.choice((0.0, first)), other) for other in ranks]
    events = []
    at = _FIRST
    for _ in range(dice.randint(1, 3) if fault == "stop" else dice.randint(10, 30)):
        at += dice.uniform(0.0, 0.5 if fault == "stop" else 0.2)
        if at >= seconds:
            break
        length = dice.choice((0.1, dice.uniform(0.1, 3.0))) if fault == "stop" else 0.0
        events.append(Event(at, dice.randrange(size), length))
        at += length + (_GAP if fault == "stop" else 0.0)
    return events
