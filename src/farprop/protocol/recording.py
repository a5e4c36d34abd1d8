"""The recording of what all workers of a job do: commands and replies, whose recording it is, and whose clock.

Whoever records (a worker, or an observer from outside of the job) begins the recording on every worker, renews it every
few seconds, ends it, and fetches what each worker has noted. A worker that nobody renews ends by itself, so whoever
records can die or be cut off, and nothing stays on. Nothing here has a socket or a clock of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from farprop.errors import ProtocolError
from farprop.protocol.events import Event

_T = TypeVar("_T")

LEASE_SECONDS = 10.0  # a worker that is not renewed for so long ends its recording, and forgets it
RENEW_SECONDS = 2.5
CHUNK_BYTES = 4 << 20
MAX_EVENTS = 200_000  # on one worker; the rest is counted
MAX_RECORDING_BYTES = 512 << 20  # of one worker, as it is when it is not compressed
_PINGS = 24


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """What time is it?"""


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Record from now on."""

    recording: str
    operators: bool
    """Whether torch's operators are recorded, too."""
    max_events: int


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    """Go on."""

    recording: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """Record no more, and make ready what was recorded."""

    recording: str


class Fetch(msgspec.Struct, frozen=True, tag="fetch"):
    """Send a part of what was recorded. The worker forgets it when the last part is sent."""

    recording: str
    offset: int


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Record no more, and forget what was recorded."""

    recording: str


Command = Ping | Begin | Renew | End | Fetch | Drop


class Measure(msgspec.Struct, frozen=True, tag="measure"):
    """From an observer to a worker: measure how much the clock of another worker is ahead of yours."""


ObserversCommand = Command | Measure


class State(msgspec.Struct, frozen=True, tag="state"):
    """What a worker says to any command but ``Fetch``."""

    now: float
    """Its monotonic clock."""
    clock: str
    """Which clock that is. Workers with the same have the same."""
    is_ready: bool = True
    """Whether what was asked for is done. It goes on meanwhile; ask again."""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str
    is_busy: bool = False
    """Whether the reason is that somebody else records."""


class Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    data: bytes
    size: int
    """Of all chunks together."""


class ClockOffset(msgspec.Struct, frozen=True, tag="clock"):
    """How much another clock is ahead of ours, at one time of ours."""

    at: float
    offset: float
    error: float
    """The offset may be wrong by so much, in both directions."""


Reply = State | Refused | Chunk | ClockOffset


class Operator(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of one of torch's operators."""

    name: str
    thread: int
    began: float
    ended: float


class Recorded(msgspec.Struct, frozen=True):
    """What a worker has recorded. Times are those of its monotonic clock."""

    began: float
    ended: float
    events: list[Event]
    dropped: int
    """How many events did not fit."""
    operators: list[Operator]
    dropped_operators: int
    problems: list[str]
    """What else is missing, and why."""
    threads: dict[int, str]
    """Names of threads, by their native ids."""
    main_thread: int
    cpu_seconds: float
    """Processor time that the process has used meanwhile, in all threads."""
    unfinished: list[Event] = []
    """What had not ended when the recording did."""
    dropped_unfinished: int = 0


# Made once: msgspec must not learn a class on two threads at the same moment (``json_decoding.py``).
_DECODERS: dict[Any, msgspec.msgpack.Decoder[Any]] = {
    kind: msgspec.msgpack.Decoder(kind) for kind in (Command, ObserversCommand, Reply, Recorded)
}


def pack(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def unpack(data: bytes, kind: Any) -> Any:
    """Parse a command, a reply, or what another process recorded; raises ``ProtocolError`` if it makes no sense."""
    try:
        return _DECODERS[kind].decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"a command or a reply about a recording makes no sense: {error}") from error


class Lease:
    """Who records on this worker, and until when: one recording at a time. Times are the caller's."""

    def __init__(self) -> None:
        self.recording: str | None = None
        self._by = ""
        self._since = 0.0
        self._until = 0.0

    def begin(self, recording: str, by: str, now: float) -> str | None:
        """Begin a recording for ``by``; returns why not, if another one is under way."""
        if self.recording is not None and now < self._until:
            return (
                f"{self._by} records the job since {now - self._since:.1f} s. Wait until it has ended: one that has "
                f"died is forgotten after {LEASE_SECONDS:.0f} s."
            )
        self.recording, self._by, self._since = recording, by, now
        self._until = now + LEASE_SECONDS
        return None

    def renew(self, recording: str, now: float) -> bool:
        """Whoever records is there; returns False if the recording is not, any more."""
        if self.recording != recording or now >= self._until:
            return False
        self._until = now + LEASE_SECONDS
        return True

    def left(self, now: float) -> float:
        """The seconds until it ends, if nobody renews it."""
        return self._until - now

    def release(self) -> None:
        self.recording = None


# Clocks


def measure_offset(ask: Callable[[], float], now: Callable[[], float], pings: int = _PINGS) -> ClockOffset:
    """Measure how much another clock is ahead.

    The other clock was read at some moment between the question and its answer. So half of a round trip bounds the
    error, however unequal the two ways are, and the shortest round trip counts.

    Args:
        ask: asks the other process for its clock.
        now: our clock.
        pings: how often to ask.
    """
    best: ClockOffset | None = None
    for _ in range(pings):
        asked = now()
        theirs = ask()
        answered = now()
        error = (answered - asked) / 2
        if best is None or error < best.error:
            best = ClockOffset((asked + answered) / 2, theirs - (asked + answered) / 2, error)
    assert best is not None
    return best


class CommonClock:
    """Turns the times of another clock into those of ours.

    Between two measurements the offset is taken to change evenly, because oscillators drift.
    """

    def __init__(self, first: ClockOffset, last: ClockOffset) -> None:
        self.error = max(first.error, last.error)
        self._first = first
        seconds = last.at - first.at
        self._drift = (last.offset - first.offset) / seconds if seconds > 0 else 0.0
        self._is_ours = first.offset == last.offset == 0.0

    def ours(self, theirs: float) -> float:
        if self._is_ours:
            return theirs
        near = theirs - self._first.offset
        return near - self._drift * (near - self._first.at)


SAME_CLOCK = CommonClock(ClockOffset(0.0, 0.0, 0.0), ClockOffset(0.0, 0.0, 0.0))
