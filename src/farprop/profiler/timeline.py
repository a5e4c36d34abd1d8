"""What all workers have recorded, on one clock: slices of threads, and calls with both of their ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from farprop.profiler.session import WorkerTrace
from farprop.protocol.events import (
    BACKWARD,
    COLLECTIVE,
    GRADIENTS,
    HOOK,
    PASS,
    WAIT,
    ClientCall,
    ServedCall,
    Span,
    call_name,
)
from farprop.protocol.waits import short

_T = TypeVar("_T", ClientCall, ServedCall, Span)

# What a thread does, the most important first: a worker does what the first of these is that one of its threads does.
COMPUTING, ENCODING, WAITING = "computing", "encoding", "waiting"
STATES = (COMPUTING, ENCODING, WAITING)

_STATE_OF_SPAN = {
    PASS: ENCODING,
    BACKWARD: COMPUTING,
    GRADIENTS: ENCODING,
    HOOK: COMPUTING,
    COLLECTIVE: WAITING,
    WAIT: WAITING,
}
OPERATOR = "operator"
CLIENT_TIMES = ("began", "encoded", "sent", "answered", "ended")
SERVED_TIMES = ("arrived", "started", "decoded", "returned", "ended")
_OWN_METHODS = ("gradients", "to_here", "ref_backward")  # they run no function of the program's themselves
_OURS = "record"  # the calls of the recording itself
_POOL = "farprop-"  # how the names of farprop's own threads begin


@dataclass(frozen=True)
class Slice:
    """Something that a thread did. Slices of a thread lie one in another, or one after the other."""

    began: float
    ended: float
    name: str
    category: str
    state: str | None
    """None if it is what the slice around it does. An operator without one computes."""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A call, with the events of both of its ends on the common clock. One may be missing."""

    caller: str
    callee: str
    number: int
    client: ClientCall | None
    served: ServedCall | None

    @property
    def id(self) -> str:
        return f"{self.caller}>{self.callee}#{self.number}"

    @property
    def began(self) -> float:
        if self.client is not None:
            return self.client.began
        assert self.served is not None
        return self.served.arrived

    @property
    def is_system(self) -> bool:
        known = self.client or self.served
        return known is not None and known.system


class Worker:
    """One worker of the timeline. All times are on the common clock.

    Args:
        trace: what it has recorded.
        own_thread: the native id of the thread that records, if this is its worker.
    """

    def __init__(self, trace: WorkerTrace, own_thread: int | None = None) -> None:
        self.member = trace.member
        self.name = trace.member.name
        self.recorded = trace.recorded
        self.clock_error = trace.clock.error
        ours = trace.clock.ours
        self.began, self.ended = ours(trace.recorded.began), ours(trace.recorded.ended)
        told = [*trace.recorded.events, *trace.recorded.unfinished]
        events = [event for event in told if getattr(event, "function", "") != _OURS]
        self.client_calls = [_on(ours, event, CLIENT_TIMES) for event in events if isinstance(event, ClientCall)]
        self.served_calls = [_on(ours, event, SERVED_TIMES) for event in events if isinstance(event, ServedCall)]
        self.spans = [_on(ours, event, ("began", "ended")) for event in events if isinstance(event, Span)]
        self.operators = [
            (operator.thread, Slice(ours(operator.began), ours(operator.ended), operator.name, OPERATOR, None))
            for operator in trace.recorded.operators
        ]
        self._own_thread = own_thread

    def thread_name(self, thread: int) -> str:
        return self.recorded.threads.get(thread, f"thread {thread}")

    def threads(self) -> dict[int, list[Slice]]:
        """By thread, what it did, in the order of ``nested``."""
        found: dict[int, list[Slice]] = {}
        for client in self.client_calls:
            found.setdefault(client.thread, []).extend(_client_slices(client, self.name, self.began))
        for served in self.served_calls:
            found.setdefault(served.thread, []).extend(_served_slices(served, self.name, self.began))
        for span in self.spans:
            state = _STATE_OF_SPAN.get(span.category)
            found.setdefault(span.thread, []).append(
                Slice(span.began, span.ended, span.name, span.category, state, span.details)
            )
        for thread, operator in self.operators:
            found.setdefault(thread, []).append(operator)
        # A request that is queued is on no thread.
        return {thread: slices for thread, all_of_it in found.items() if (slices := list(nested(all_of_it)))}

    def own_code(self) -> dict[int, Slice]:
        """By thread that runs code of the program's own, from when to when it does.

        That is the thread that records, all of the time; and others that make calls but serve none, from the first
        of them to the last.
        """
        found: dict[int, Slice] = {}
        for client in self.client_calls:
            is_own = client.parent is None and not client.system
            if is_own and not self.thread_name(client.thread).startswith(_POOL):
                _extend(found, client.thread, client.began, client.ended if client.is_waited_for else client.sent)
        for span in self.spans:
            if span.thread in found:
                _extend(found, span.thread, span.began, span.ended)
        if self._own_thread is not None:
            _extend(found, self._own_thread, self.began, self.ended)
        return found


def _extend(found: dict[int, Slice], thread: int, began: float, ended: float) -> None:
    old = found.get(thread)
    if old is not None:
        began, ended = min(began, old.began), max(ended, old.ended)
    found[thread] = Slice(began, ended, "the program", "program", COMPUTING)


def _on(ours: Callable[[float], float], event: _T, times: tuple[str, ...]) -> _T:
    """The event on our clock."""
    if ours(event.ended) == event.ended:
        return event
    return msgspec.structs.replace(event, **{name: ours(getattr(event, name)) for name in times})


def note_early(details: dict[str, Any], began: float, since: float) -> None:
    """Say in the details of a slice if it began before the recording, from whose beginning on it is drawn."""
    if began < since:
        details["began before the recording (s)"] = round(since - began, 9)


def _client_slices(call: ClientCall, own: str, since: float) -> Iterator[Slice]:
    name = call_name(call.kind, call.function, own, call.callee)
    details = {"call": f"{own}>{call.callee}#{call.number}", "bytes sent": call.sent_bytes, "outcome": call.outcome}
    if call.message:
        details["message"] = call.message
    note_early(details, call.began, since)
    if call.parent is not None:
        details["part of"] = f"{call.parent[0]}>{own}#{call.parent[1]}"
    category = "system" if call.system else "call"
    if not call.is_waited_for:
        yield Slice(call.began, call.sent, name, category, ENCODING, details)
        return
    details["bytes received"] = call.received_bytes
    yield Slice(call.began, call.ended, name, category, WAITING, details)
    yield Slice(call.began, call.encoded, "encode", "part", ENCODING)
    yield Slice(call.encoded, call.sent, "send", "part", ENCODING)
    yield Slice(call.sent, call.answered, "wait", "part", WAITING)
    yield Slice(call.answered, call.ended, "decode", "part", ENCODING)


def _served_slices(call: ServedCall, own: str, since: float) -> Iterator[Slice]:
    details = {
        "call": f"{call.caller}>{own}#{call.number}",
        "queued (s)": round(call.started - call.arrived, 9),
        "bytes received": call.received_bytes,
        "bytes sent": call.sent_bytes,
        "outcome": call.outcome,
    }
    if call.message:
        details["message"] = call.message
    note_early(details, call.started, since)
    is_ours = call.system or call.function in _OWN_METHODS
    ended = call.returned if call.is_answered_later else call.ended
    name = f"{short(call.function)} for {call.caller}"
    yield Slice(call.started, ended, name, "system" if call.system else "served", ENCODING, details)
    yield Slice(call.started, call.decoded, "decode", "part", ENCODING)
    yield Slice(call.decoded, call.returned, "run", "part", ENCODING if is_ours else COMPUTING)
    if not call.is_answered_later:
        yield Slice(call.returned, call.ended, "encode", "part", ENCODING)


def nested(slices: Iterable[Slice]) -> Iterator[Slice]:
    """Sort slices of a thread, and cut those that reach out of the one that they began in.

    All times of a worker are of one clock, except for operators: Kineto's differs by some microseconds.
    """
    outer: list[Slice] = []
    for one in sorted(slices, key=lambda found: (found.began, -found.ended)):
        while outer and outer[-1].ended <= one.began:
            outer.pop()
        if outer and one.ended > outer[-1].ended:
            one = replace(one, ended=outer[-1].ended)
        if one.ended > one.began:
            yield one
            outer.append(one)


def joined_calls(workers: Iterable[Worker]) -> list[Call]:
    """The calls of all workers, with both of their ends, in the order in which they began."""
    workers = list(workers)
    served: dict[tuple[str, str, int], list[ServedCall]] = {}
    for worker in workers:
        for event in worker.served_calls:
            served.setdefault((event.caller, worker.name, event.number), []).append(event)
    found: list[Call] = []
    for worker in workers:
        for client in worker.client_calls:
            key = (worker.name, client.callee, client.number)
            found.append(Call(*key, client, _nearest(served.get(key), client.sent)))
    matched = {id(call.served) for call in found}
    for key, ends in served.items():
        found += [Call(*key, None, end) for end in ends if id(end) not in matched]
    return sorted(found, key=lambda call: call.began)


def _nearest(ends: list[ServedCall] | None, sent: float) -> ServedCall | None:
    """A connection that was dialled again counts its calls anew, so two calls may have the same number."""
    return min(ends, key=lambda end: abs(end.arrived - sent)) if ends else None
