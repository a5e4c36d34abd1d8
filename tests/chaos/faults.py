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
    "mixed": (ConnectionLostError, CollectiveError, RpcTimeoutError),
}

_FIRST = 0.3  # seconds after the start of the job
_GAP = 0.5


@dataclass(frozen=True)
class Event:
    """Something that the driver does to a worker."""

    fault: str
    at: float  # seconds after the start of the job; 0: before it joins
    rank: int
    seconds: float = 0.0  # how long a stop lasts, or until the successor of a killed worker starts
    target: int = -1  # of a flood
    calls: int = 0  # of a flood


def draw_events(fault: str, size: int, seconds: float, dice: random.Random) -> list[Event]:
    """The schedule of a scenario: events that follow each other in the time that the job runs."""
    first = dice.uniform(_FIRST, seconds / 2)
    rank = dice.randrange(size)
    match fault:
        case "none":
            return []
        case "kill":
            return [Event(fault, first, rank)]
        case "restart":
            return [Event(fault, first, rank, dice.choice((0.0, dice.uniform(0.0, 1.0))))]
        case "flood":
            target = dice.choice([other for other in range(size) if other != rank])
            return [Event(fault, first, rank, target=target, calls=dice.randrange(1000, 8000))]
        case "no-shm":
            ranks = dice.sample(range(size), dice.randint(1, size))
            return [Event(fault, dice.choice((0.0, first)), other) for other in ranks]
        case "mixed":
            kinds = ("kill", "stop", "interrupt", "no-shm")
            return sorted(
                (event for kind in kinds for event in draw_events(kind, size, seconds, dice)),
                key=lambda event: event.at,
            )
    events = []
    at = _FIRST
    for _ in range(dice.randint(1, 3) if fault == "stop" else dice.randint(10, 30)):
        at += dice.uniform(0.0, 0.5 if fault == "stop" else 0.2)
        if at >= seconds:
            break
        length = dice.uniform(0.1, 3.0) if fault == "stop" else 0.0
        events.append(Event(fault, at, dice.randrange(size), length))
        at += length + (_GAP if fault == "stop" else 0.0)
    return events
