"""The faults: when and whom each hits, and which errors it explains."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed import DistStoreError

from farprop.errors import CollectiveError, ConnectionLostError, RendezvousError, RpcTimeoutError, UsageError
from tests.support.links import BOTH

FAULTS = (
    "none",
    "kill",
    "stop",
    "interrupt",
    "restart",
    "flood",
    "no-shm",
    "cut",
    "slow",
    "lossy",
    "disk",
    "clock",
    "mixed",
)
ON_HOSTS = frozenset({"cut", "slow", "lossy"})
_IN_MIXED = ("kill", "stop", "interrupt", "flood", "no-shm", "cut", "slow", "lossy", "disk", "clock")
_NOT_FOR_RANKS = ("flood", "restart")  # ranks of a process group make no calls, and their groups have a size

_LOST = (ConnectionLostError, CollectiveError)
_FIRST = 0.3  # seconds after the start of the job
_GAP = 0.5
# Half a second without the network does no harm, says the design: nobody counts as vanished.
_HARMLESS_CUT = 0.5
_LONGEST_CUT = 8.0
# A host counts as vanished if a packet and three more for it are lost in a row: with few losses that does not happen.
_HARMLESS_LOSS = 0.005
_HIGHEST_LOSS = 0.2
_DAY = 86400.0


@dataclass(frozen=True)
class Event:
    """Something that the driver does to a worker, its host, its disk or its clock."""

    fault: str
    at: float  # seconds after the start of the job; 0: before it joins; less: so many seconds after it begins to join
    rank: int
    seconds: float = 0.0  # how long it lasts; for a restart, until the successor of a killed worker starts
    target: int = -1  # of a flood
    witness: int = -1  # of a flood: a worker that calls the target, too
    calls: int = 0  # of a flood
    size: int = 0  # of a flood: the bytes of each call
    ways: tuple[str, ...] = BOTH  # of a cable
    link: dict[str, Any] = field(default_factory=dict)  # what becomes of a cable
    with_files: bool = False  # of a full disk: no file can be made
    ahead: float = 0.0  # of a clock, in seconds


def faults_of(job: str) -> list[str]:
    """The faults for a job."""
    return [fault for fault in FAULTS if job != "ddp" or fault not in _NOT_FOR_RANKS]


def errors_of(events: Iterable[Event]) -> tuple[type[BaseException], ...]:
    """The errors that these events explain, while the job runs."""
    found: set[type[BaseException]] = set()
    for event in events:
        match event.fault:
            case "kill" | "restart":
                found.add(ConnectionLostError)
            case "interrupt":
                found.update(_LOST)
            case "stop" | "slow":
                found.add(RpcTimeoutError)
            case "cut":
                found.add(RpcTimeoutError)
                if event.seconds > _HARMLESS_CUT:
                    found.update(_LOST)
            case "lossy":
                found.add(RpcTimeoutError)
                if event.link["loss"] > _HARMLESS_LOSS:
                    found.update(_LOST)
    return tuple(sorted(found, key=lambda error: error.__name__))


def join_errors_of(events: Iterable[Event]) -> tuple[type[BaseException], ...]:
    """The errors that these events explain when the workers join."""
    if not any(event.fault == "disk" and event.at <= 0 for event in events):
        return ()
    # The last one is of torch's own store, which torch makes for process groups.
    return UsageError, RendezvousError, DistStoreError


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
            return [_flood(first, size, dice)]
        case "no-shm":
            ranks = dice.sample(range(size), dice.randint(1, size))
            return [Event(fault, dice.choice((0.0, first)), other) for other in ranks]
        case "cut":
            return _cuts(size, seconds, dice)
        case "slow" | "lossy":
            link = _slow(dice) if fault == "slow" else _lossy(dice)
            ranks = dice.sample(range(size), dice.randint(1, size))
            ways = dice.choice((BOTH, BOTH, ("in",), ("out",)))
            length = seconds - first
            return [Event(fault, first, other, length, ways=ways, link=link) for other in ranks]
        case "disk":
            at = dice.choice((0.0, -dice.uniform(0.0, 0.3), first))
            return [Event(fault, at, rank, dice.uniform(0.5, 3.0), with_files=dice.random() < 0.5)]
        case "clock":
            return _clocks(size, seconds, dice)
        case "mixed":
            kinds = dice.sample(_IN_MIXED, 4)
            events = [event for kind in kinds for event in draw_events(kind, size, seconds, dice)]
            return sorted(map(_in_mixture, events), key=lambda event: event.at)
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


def _in_mixture(event: Event) -> Event:
    """Make floods smaller: on a loaded machine, a whole flood and three other faults take longer than a scenario."""
    return replace(event, calls=-(-event.calls // 10))


def _flood(at: float, size: int, dice: random.Random) -> Event:
    """Tens of thousands of small calls, or more than a gigabyte in large ones."""
    rank, target, witness = dice.sample(range(size), 3)
    if dice.random() < 0.5:
        return Event("flood", at, rank, target=target, witness=witness, calls=dice.randrange(20_000, 50_000))
    length = int(2 ** dice.uniform(16, 25))
    return Event("flood", at, rank, target=target, witness=witness, calls=(3 << 29) // length, size=length)


def _cuts(size: int, seconds: float, dice: random.Random) -> list[Event]:
    """Some that do no harm, or some that do: a single long one, or several."""
    harmless = dice.random() < 0.4
    longest = _HARMLESS_CUT if harmless else _LONGEST_CUT
    events = []
    at = _FIRST
    for _ in range(dice.randint(1, 3)):
        at += dice.uniform(0.0, 1.0)
        if at >= seconds:
            break
        length = dice.uniform(0.2, longest)
        ways = dice.choice((BOTH, BOTH, ("in",), ("out",)))
        events.append(Event("cut", at, dice.randrange(size), length, ways=ways, link={"loss": 1.0}))
        # The kernel sends again less and less often. A second cut during the first one's delays would be a longer cut.
        at += length + (2.0 if harmless else _GAP)
    return events


def _slow(dice: random.Random) -> dict[str, Any]:
    """From a bad line to a distant host."""
    link = {"delay": dice.choice((0.0, dice.uniform(0.001, 0.15)))}
    if link["delay"] == 0.0 or dice.random() < 0.5:
        link["rate"] = 1e6 * dice.uniform(0.5, 10.0)
    return link


def _lossy(dice: random.Random) -> dict[str, Any]:
    loss = dice.choice((dice.uniform(0.0, _HARMLESS_LOSS), dice.uniform(_HARMLESS_LOSS, _HIGHEST_LOSS)))
    return {"loss": loss, "double": dice.uniform(0.0, 0.1), "reorder": dice.uniform(0.0, 0.3)}


def _clocks(size: int, seconds: float, dice: random.Random) -> list[Event]:
    """Monotonic clocks that are ahead from the start, and wall clocks that jump by minutes to days."""
    events = []
    if dice.random() < 0.5:
        ranks = dice.sample(range(size), dice.randint(1, size))
        events = [Event("clock", 0.0, other, ahead=dice.choice((60.0, _DAY, 30 * _DAY))) for other in ranks]
    at = _FIRST
    while at < seconds:
        ahead = dice.choice((-1, 1)) * dice.choice((dice.uniform(60, 3600), dice.uniform(_DAY, 30 * _DAY)))
        events.append(Event("clock", at, dice.randrange(size), ahead=ahead))
        at += dice.uniform(0.1, 1.0)
    return events
