"""Checks a Chrome trace as strictly as Perfetto's importer reads it, and follows its arrows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy

_ROUNDING = 0.002  # microseconds: times are written in nanoseconds
Event = dict[str, Any]


@dataclass(frozen=True)
class Arrow:
    """An arrow, with the innermost slices in which it begins and ends."""

    name: str
    start: Event
    end: Event
    began: float
    ended: float


@dataclass(frozen=True)
class Trace:
    processes: dict[int, str]
    slices: list[Event]
    arrows: list[Arrow]
    facts: dict[str, Any]

    def named(self, *beginnings: str) -> list[Event]:
        """The slices whose names begin like this."""
        return [event for event in self.slices if event["name"].startswith(beginnings)]

    def worker_of(self, event: Event) -> str:
        return self.processes[event["pid"]]


def checked(content: Any) -> Trace:
    """Check a trace, and return what is in it."""
    assert set(content) == {"traceEvents", "displayTimeUnit", "otherData"}
    by_phase: dict[str, list[Event]] = defaultdict(list)
    for event in content["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert 0 < event["tid"] < 2**31
        by_phase[event["ph"]].append(event)
    assert set(by_phase) <= set("XMsfbe"), "phases that nobody has checked"
    names = {event["pid"]: event["args"]["name"] for event in by_phase["M"] if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in by_phase["M"] if event["name"] == "thread_name"}
    for event in by_phase["X"]:
        assert event["dur"] >= 0
        assert event["pid"] in names
        assert (event["pid"], event["tid"]) in threads, "a slice on a thread without a name"
    _check_nesting(by_phase["X"])
    _check_pairs(by_phase["b"], by_phase["e"])
    return Trace(names, by_phase["X"], _arrows(by_phase), content["otherData"])


def _check_nesting(slices: Iterable[Event]) -> None:
    """Slices of a thread lie one in another, or one after the other."""
    outer: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        stack = outer[event["pid"], event["tid"]]
        while stack and _end(stack[-1]) <= event["ts"] + _ROUNDING:
            stack.pop()
        assert not stack or _end(event) <= _end(stack[-1]) + _ROUNDING, f"{event} crosses {stack[-1]}"
        stack.append(event)


def _check_pairs(begins: list[Event], ends: list[Event]) -> None:
    def key(event: Event) -> tuple[Any, ...]:
        return event["pid"], event["cat"], event["id"], event["name"]

    begun = {key(event): event["ts"] for event in begins}
    assert sorted(begun) == sorted(map(key, ends))
    assert all(begun[key(event)] <= event["ts"] for event in ends)


def _arrows(by_phase: dict[str, list[Event]]) -> list[Arrow]:
    starts = {event["id"]: event for event in by_phase["s"]}
    ends = {event["id"]: event for event in by_phase["f"]}
    assert starts.keys() == ends.keys(), "arrows without a beginning or an end"
    assert len(starts) == len(by_phase["s"])
    assert all(event["bp"] == "e" for event in ends.values())
    threads: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in by_phase["X"]:
        threads[event["pid"], event["tid"]].append(event)
    looked_at = {thread: _Thread(slices) for thread, slices in threads.items()}
    found = []
    for identity, start in starts.items():
        end = ends[identity]
        assert start["name"] == end["name"]
        found.append(Arrow(start["name"], _around(looked_at, start), _around(looked_at, end), start["ts"], end["ts"]))
    return found


class _Thread:
    """The slices of a thread. There are thousands, and as many arrows."""

    def __init__(self, slices: list[Event]) -> None:
        self._slices = slices
        self._begin = numpy.array([one["ts"] for one in slices]) - _ROUNDING
        self._end = numpy.array([_end(one) for one in slices]) + _ROUNDING
        self._length = numpy.array([one["dur"] for one in slices])

    def innermost(self, time: float) -> Event | None:
        around = numpy.flatnonzero((self._begin <= time) & (time <= self._end))
        return self._slices[around[self._length[around].argmin()]] if len(around) else None


def _around(threads: dict[tuple[int, int], _Thread], point: Event) -> Event:
    """The innermost slice at an end of an arrow."""
    found = threads[point["pid"], point["tid"]].innermost(point["ts"])
    assert found is not None, f"the end of an arrow that lies in no slice: {point}"
    return found


def _end(event: Event) -> float:
    end: float = event["ts"] + event["dur"]
    return end


def end_of(event: Event) -> float:
    """When a slice ends, in microseconds."""
    return _end(event)
