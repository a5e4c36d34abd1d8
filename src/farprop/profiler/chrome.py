"""Writes a timeline as a Chrome trace, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A process is a worker. Its threads are its threads, and further ones are *lanes*: calls that nobody waits for would lie
across each other on their thread, so each is in the first lane that is free. Requests that are queued, and those whose
function has returned a future, are asynchronous slices.

An arrow (a flow: ``s`` and ``f``) goes from a slice to another: from each call to its run and back, and from the
encoding of gradients to the run of the graph that they start.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from farprop.profiler.timeline import Call, Slice, Worker, note_early
from farprop.protocol.events import BACKWARD, GRADIENTS, UNFINISHED, ClientCall, Span, call_name

_STRIDE = 100_000  # between the ids of two workers: ids of processes and threads of several hosts may be equal
_LANES = 50_000
_MOST_LANES = 500

Event = dict[str, Any]


class ChromeTrace:
    """Makes the events of a trace.

    Args:
        workers: the workers, by rank.
        calls: their calls, with both ends.
        began: the time that is 0 in the trace.
    """

    def __init__(self, workers: Iterable[Worker], calls: Iterable[Call], began: float) -> None:
        self._workers = list(workers)
        self._calls = list(calls)
        self._zero = began
        self._pids = {worker.name: (index + 1) * _STRIDE for index, worker in enumerate(self._workers)}
        self._tids: dict[tuple[str, int], int] = {}
        self._flows = 0
        self._lane_of: dict[int, int] = {}  # by the identity of a client call

    def events(self) -> Iterator[Event]:
        """All events of the trace, those of the processes first."""
        for worker in self._workers:
            yield from self._process(worker)
            for thread, slices in sorted(worker.threads().items()):
                tid = self._tid(worker, thread)
                for one in slices:
                    if one.ended > self._zero:
                        yield self._slice(worker, tid, one)
            yield from self._in_flight(worker)
            yield from self._asynchronous(worker)
            yield from self._names(worker)
        yield from self._call_flows()
        yield from self._gradient_flows()

    # Processes and threads

    def _process(self, worker: Worker) -> Iterator[Event]:
        pid, member = self._pids[worker.name], worker.member
        self._tids[worker.name, worker.recorded.main_thread] = pid  # Perfetto takes it for the main thread
        yield _metadata(pid, pid, "process_name", name=worker.name)
        yield _metadata(pid, pid, "process_labels", labels=f"rank {member.rank}, pid {member.pid} on {member.host}")
        yield _metadata(pid, pid, "process_sort_index", sort_index=member.rank)

    def _tid(self, worker: Worker, thread: int) -> int:
        key = worker.name, thread
        if key not in self._tids:
            self._tids[key] = self._pids[worker.name] + len(self._tids) % (_LANES - 1) + 1
        return self._tids[key]

    def _names(self, worker: Worker) -> Iterator[Event]:
        pid = self._pids[worker.name]
        for (name, thread), tid in self._tids.items():
            if name == worker.name:
                yield _metadata(pid, tid, "thread_name", name=f"{worker.thread_name(thread)} ({thread})")
                yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)

    # Slices

    def _micros(self, seconds: float) -> float:
        # What began before the recording is drawn from its beginning.
        return max(0.0, round((seconds - self._zero) * 1e6, 3))

    def _slice(self, worker: Worker, tid: int, one: Slice) -> Event:
        began, ended = self._micros(one.began), self._micros(one.ended)
        event = {
            "ph": "X",
            "cat": one.category,
            "name": one.name,
            "pid": self._pids[worker.name],
            "tid": tid,
            "ts": began,
            "dur": round(ended - began, 3),
        }
        if one.details:
            event["args"] = one.details
        return event

    def _in_flight(self, worker: Worker) -> Iterator[Event]:
        """Calls that their thread did not wait for, from when they were sent, each in a lane.

        The callee may have read the last bytes before the caller notes that they are sent.
        """
        pid = self._pids[worker.name]
        free: list[int] = []
        busy: list[tuple[float, int]] = []
        count = 0
        for call in sorted((c for c in worker.client_calls if not c.is_waited_for), key=lambda c: c.encoded):
            while busy and busy[0][0] <= call.encoded:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                lane = heapq.heappop(free)
            elif count < _MOST_LANES:
                lane, count = count, count + 1
            else:
                continue
            heapq.heappush(busy, (call.ended, lane))
            tid = self._lane_of[id(call)] = pid + _LANES + lane
            name = call_name(call.kind, call.function, worker.name, call.callee)
            details = {"call": f"{worker.name}>{call.callee}#{call.number}", "outcome": call.outcome}
            note_early(details, call.encoded, worker.began)
            yield self._slice(worker, tid, Slice(call.encoded, call.ended, name, "in flight", None, details))
        for lane in range(count):
            tid = pid + _LANES + lane
            yield _metadata(pid, tid, "thread_name", name="calls in flight")
            yield _metadata(pid, tid, "thread_sort_index", sort_index=tid)

    def _asynchronous(self, worker: Worker) -> Iterator[Event]:
        pid = self._pids[worker.name]
        for call in worker.served_calls:
            identity = f"{call.caller}>{worker.name}#{call.number}"
            if call.started > call.arrived and not call.system:
                yield from self._pair(pid, "queued", identity, call.arrived, call.started)
            if call.is_answered_later:
                yield from self._pair(pid, "unfinished", identity, call.returned, call.ended)

    def _pair(self, pid: int, name: str, identity: str, began: float, ended: float) -> Iterator[Event]:
        for phase, when in (("b", began), ("e", ended)):
            event = {"ph": phase, "cat": name, "name": name, "id": identity, "pid": pid, "tid": pid}
            yield {**event, "ts": self._micros(when)}

    # Arrows

    def _call_flows(self) -> Iterator[Event]:
        for call in self._calls:
            client, served = call.client, call.served
            if client is None or served is None or call.is_system:
                continue
            caller, callee = self._pids[call.caller], self._pids[call.callee]
            runs_on = self._tids.get((call.callee, served.thread))
            made_on = self._tids.get((call.caller, client.thread))
            if runs_on is None or made_on is None:
                continue  # it is queued, or was made by a thread that has ended
            yield from self._flow("call", (caller, made_on, _inside(client.began, client.sent)),
                                  (callee, runs_on, _inside(served.started, served.decoded)))  # fmt: skip
            back_to = made_on if client.is_waited_for else self._lane_of.get(id(client))
            if back_to is not None and UNFINISHED not in (client.outcome, served.outcome):
                # A function that has returned a future is drawn until then, and its answer is sent later.
                left = served.returned if served.is_answered_later else served.ended
                before = served.decoded if served.is_answered_later else served.returned
                came = _inside(client.answered, client.ended) if client.is_waited_for else _before(client)
                yield from self._flow("answer", (callee, runs_on, _inside(before, left)), (caller, back_to, came))

    def _gradient_flows(self) -> Iterator[Event]:
        encoded: dict[tuple[Any, ...], tuple[Worker, Span]] = {}
        for worker in self._workers:
            for span in worker.spans:
                if span.category == GRADIENTS:
                    for message in span.details.get("messages", ()):
                        encoded[(*_pass(span), message)] = worker, span
        for worker in self._workers:
            for span in worker.spans:
                if span.category != BACKWARD:
                    continue
                for message in span.details.get("messages", ()):
                    found = encoded.get((*_pass(span), message))
                    if found is not None:
                        sender, encoding = found
                        start = self._place(sender, encoding, _inside(encoding.began, encoding.ended))
                        # At its beginning: later, a hook may be drawn in it, and the arrow would end there.
                        yield from self._flow("gradients", start, self._place(worker, span, span.began))

    def _place(self, worker: Worker, span: Span, when: float) -> tuple[int, int, float]:
        return self._pids[worker.name], self._tid(worker, span.thread), when

    def _flow(self, name: str, start: tuple[int, int, float], end: tuple[int, int, float]) -> Iterator[Event]:
        self._flows += 1
        for phase, (pid, tid, when) in (("s", start), ("f", end)):
            event = {"ph": phase, "cat": name, "name": name, "id": self._flows, "pid": pid, "tid": tid}
            event["ts"] = self._micros(when)
            if phase == "f":
                event["bp"] = "e"  # it ends in the slice that is there, not in the next one
            yield event


def _pass(span: Span) -> tuple[Any, ...]:
    return tuple(span.details.get(name) for name in ("context", "origin", "pass"))


def _inside(began: float, ended: float) -> float:
    return (began + ended) / 2


def _before(client: ClientCall) -> float:
    return max(_inside(client.encoded, client.ended), client.ended - 1e-6)


def _metadata(pid: int, tid: int, kind: str, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def check_path(path: Path) -> None:
    """Raise ``OSError`` if a file can't be written there: before the program runs, not after it."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory.")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        problem = PermissionError if path.parent.is_dir() else FileNotFoundError
        raise problem(f"No file can be written in {path.parent}.")


def write(path: Path, events: Iterable[Event], facts: dict[str, Any]) -> None:
    """Write a trace. The file is there as a whole, or not at all."""
    content = {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": facts}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(msgspec.json.encode(content))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
