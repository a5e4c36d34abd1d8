"""The task stream: what each thread of each worker did when, as slices for a drawing.

A busy worker has many more events than a drawing has points. So slices of one function that are short and close
together are drawn as one, which knows how many they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from farprop.protocol import events
from farprop.protocol.events import OK, ClientCall, Event, ServedCall
from farprop.protocol.inspection import Recent

RUN, WAIT, SPAN = "run", "wait", "span"
MOST_SLICES = 3000
_CLOSE = (0.0002, 0.001, 0.004, 0.016, 0.064)  # seconds: slices this close are drawn as one, if need be
_BLOCKING = ("rpc_sync", "to_here")  # of the kinds of calls, those that the calling thread waits for


@dataclass
class Slice:
    """Something that a thread did."""

    worker: str
    thread: int
    name: str
    kind: str
    """``run``: it ran a function for another worker. ``wait``: it waited for an answer, gradients or a collective.
    ``span``: something else, such as a backward pass."""
    start: float
    """By the time of day."""
    end: float
    peer: str
    """The caller, or the worker that it waited for; empty if there were several, or none."""
    count: int = 1
    busy: float = 0.0
    """The sum of the times of those that are drawn as one."""
    failed: int = 0


@dataclass
class StreamPart:
    """The slices of one look, as lists of numbers: names are in tables."""

    names: list[str] = field(default_factory=list)
    lanes: list[tuple[str, int, str]] = field(default_factory=list)
    """Worker, thread, and what the thread is called."""
    slices: list[tuple[int, int, str, int, int, int, int, int, str]] = field(default_factory=list)
    """Lane, name, kind, start and length and busy in microseconds (the start from the time of the look), count, failed,
    peer."""
    missing: int = 0
    """The events that are not in it, because there were too many."""


def slices_of(recent: Recent) -> list[Slice]:
    """The slices of what a worker told, in no order."""
    to_wall = recent.wall - recent.now
    return [made for event in recent.events if (made := _slice(recent.name, event, to_wall)) is not None]


def _slice(worker: str, event: Event, to_wall: float) -> Slice | None:
    if isinstance(event, ServedCall):
        # If it has returned a future, the thread was free from then on.
        end = event.returned if event.returned > event.decoded else event.ended
        kind, name, start, peer, outcome = RUN, event.function, event.started, event.caller, event.outcome
    elif isinstance(event, ClientCall):
        if event.kind not in _BLOCKING:
            return None
        kind, name, start, end, peer = WAIT, event.function, event.began, event.ended, event.callee
        outcome = event.outcome
    else:
        kind = WAIT if event.category == events.WAIT else SPAN
        name, start, end = event.name, event.began, event.ended
        peer, outcome = "", OK
    return Slice(
        worker, event.thread, name, kind, start + to_wall, end + to_wall, peer, 1, end - start, int(outcome != OK)
    )


def joined(slices: Iterable[Slice], most: int = MOST_SLICES) -> list[Slice]:
    """Slices for a drawing: about ``most`` of them at most, by drawing those as one that are close together."""
    found = sorted(slices, key=lambda one: (one.worker, one.thread, one.kind, one.start))
    for close in _CLOSE:
        found = _joined(found, close)
        if len(found) <= most:
            return found
    return sorted(found, key=lambda one: one.start)[-most:]


def _joined(slices: Sequence[Slice], close: float) -> list[Slice]:
    found: list[Slice] = []
    for one in slices:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.worker, last.thread, last.kind, last.name) == (one.worker, one.thread, one.kind, one.name)
            and one.start - last.end <= close
            and one.busy <= close * one.count
            and last.busy <= close * last.count
        ):
            last.end = max(last.end, one.end)
            last.count += one.count
            last.busy += one.busy
            last.failed += one.failed
            last.peer = last.peer if last.peer == one.peer else ""
        else:
            found.append(one)
    return found


def stream_part(recent: Iterable[Recent], main_threads: dict[str, int], now: float) -> StreamPart:
    """The slices of one look at all workers.

    Args:
        recent: what they told.
        main_threads: the native id of each worker's main thread.
        now: the time of the look.
    """
    recent = list(recent)
    part = StreamPart(missing=sum(one.missing for one in recent))
    names: dict[str, int] = {}
    lanes: dict[tuple[str, int], int] = {}
    for one in joined(found for told in recent for found in slices_of(told)):
        lane = lanes.get((one.worker, one.thread))
        if lane is None:
            lane = lanes[one.worker, one.thread] = len(lanes)
            is_main = main_threads.get(one.worker) == one.thread
            part.lanes.append((one.worker, one.thread, "main" if is_main else ""))
        name = names.setdefault(one.name, len(names))
        microseconds = [round(value * 1e6) for value in (one.start - now, one.end - one.start, one.busy)]
        start, length, busy = microseconds
        part.slices.append((lane, name, one.kind, start, length, busy, one.count, one.failed, one.peer))
    part.names = list(names)
    return part
