"""Where the time of a recording went: of each worker, and of the slowest calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from farprop.profiler.text import duration, table
from farprop.profiler.timeline import COMPUTING, ENCODING, STATES, WAITING, Call, Slice, Worker
from farprop.protocol.events import UNFINISHED, call_name

Interval = tuple[float, float, str]


@dataclass(frozen=True)
class WorkerSummary:
    """The time of one worker, in seconds. The first four add up to ``wall``."""

    worker: str
    computing: float
    """A thread ran a called function, the program's own code, a local graph of a backward pass, or a hook."""
    encoding: float
    """None did; and one encoded, sent or decoded, or did something else of farprop's own."""
    waiting: float
    """Neither; and one waited for an answer, a future or a collective."""
    idle: float
    """No thread had anything to do."""
    wall: float
    """How long the worker was recorded."""
    cpu: float
    """Processor time of the process, in all threads, measured by the system. More than ``wall`` if several threads
    computed at once; less than ``computing`` if code slept, or waited for a processor."""
    bubble: float | None
    """The share of the time between its first work and its last in which it neither computed nor encoded; None if it
    had no work."""
    serves: bool
    """Whether other workers called it."""


@dataclass(frozen=True)
class Summary:
    """Where the time of each worker went. ``print`` shows a table."""

    workers: list[WorkerSummary]
    wall: float
    missing: dict[str, str]
    clock_error: float

    def __getitem__(self, worker: str) -> WorkerSummary:
        """The summary of the worker with this name."""
        for found in self.workers:
            if found.worker == worker:
                return found
        raise KeyError(worker)

    @property
    def bubble(self) -> float | None:
        """The bubble of a pipeline: the mean of the workers that others called; None if there are none."""
        shares = [found.bubble for found in self.workers if found.serves and found.bubble is not None]
        return sum(shares) / len(shares) if shares else None

    def __str__(self) -> str:
        head = ("worker", "computing", "encoding", "waiting", "idle", "wall", "cpu", "bubble")
        rows = [
            (
                found.worker,
                *(
                    _share(seconds, found.wall)
                    for seconds in (found.computing, found.encoding, found.waiting, found.idle)
                ),
                duration(found.wall),
                duration(found.cpu),
                "-" if found.bubble is None else f"{found.bubble:.0%}",
            )
            for found in self.workers
        ]
        lines = [table(head, rows)]
        if self.bubble is not None:
            lines.append(f"bubble: {self.bubble:.0%} between the first and the last work of called workers")
        if self.clock_error:
            lines.append(f"clocks of other hosts are known to {duration(self.clock_error)}")
        lines += [f"missing: {name}: {reason}" for name, reason in self.missing.items()]
        return "\n".join(lines)


def _share(seconds: float, wall: float) -> str:
    return f"{duration(seconds)} {seconds / wall if wall else 0.0:4.0%}"


def summarize(worker: Worker) -> WorkerSummary:
    """Say where the time of a worker went."""
    seconds = dict.fromkeys(STATES, 0.0)
    first = last = busy = None
    for began, ended, state in _states(worker):
        seconds[state] += ended - began
        if state in (COMPUTING, ENCODING):
            first = began if first is None else first
            last = ended
            busy = (busy or 0.0) + ended - began
    wall = worker.ended - worker.began
    bubble = None
    if first is not None and last is not None and busy is not None and last > first:
        bubble = 1.0 - busy / (last - first)
    return WorkerSummary(
        worker=worker.name,
        computing=seconds[COMPUTING],
        encoding=seconds[ENCODING],
        waiting=seconds[WAITING],
        idle=wall - sum(seconds.values()),
        wall=wall,
        cpu=worker.recorded.cpu_seconds,
        bubble=bubble,
        serves=any(not call.system for call in worker.served_calls),
    )


def _states(worker: Worker) -> Iterator[Interval]:
    """What the worker did, one after the other: of all its threads, what comes first in ``STATES``."""
    own = worker.own_code()
    threads = worker.threads()
    changes: list[tuple[float, int, int]] = []  # when, which state, and whether one thread more or less is in it
    for thread in {*threads, *own}:
        for began, ended, state in states_of_thread(threads.get(thread, ()), own.get(thread)):
            began, ended = max(began, worker.began), min(ended, worker.ended)
            if ended > began:
                changes += [(began, STATES.index(state), 1), (ended, STATES.index(state), -1)]
    changes.sort()
    counts = [0] * len(STATES)
    before = worker.began
    for when, index, change in changes:
        if when > before:
            now = next((state for state, count in zip(STATES, counts, strict=True) if count), None)
            if now is not None:
                yield before, when, now
            before = when
        counts[index] += change


def states_of_thread(slices: Iterable[Slice], own: Slice | None) -> Iterator[Interval]:
    """What a thread did, one after the other: what the innermost slice says.

    Args:
        slices: what it did, in the order of ``nested``.
        own: from when to when it runs code of the program's own.
    """
    outer: list[tuple[float, str]] = []  # until when, and what
    at = 0.0
    for one in (*slices, None) if own is None else _merged(slices, own):
        limit = float("inf") if one is None else one.began
        while outer and outer[-1][0] <= limit:
            ended, state = outer.pop()
            if ended > at:
                yield at, ended, state
                at = ended
        if one is None:
            return
        if outer and limit > at:
            yield at, limit, outer[-1][1]
        at = max(at, limit)
        outer.append((one.ended, one.state or (outer[-1][1] if outer else COMPUTING)))


def _merged(slices: Iterable[Slice], own: Slice) -> Iterator[Slice | None]:
    """The slices with ``own`` around those that lie in it, and None at the end."""
    waits = True
    for one in slices:
        if waits and own.began <= one.began:
            waits = False
            yield own
        yield one
    if waits:
        yield own
    yield None


# Slowest calls


@dataclass(frozen=True)
class CallTime:
    """Where the time of a call went, in seconds.

    ``encode``, ``queue``, ``run`` and ``wire`` add up to ``seconds``. The last three are None if the callee's side is
    missing.
    """

    call: str
    """Its id."""
    name: str
    seconds: float
    encode: float
    """Encoding and decoding, at both ends, and sending the answer."""
    queue: float | None
    """It was at the callee, and no thread was free."""
    run: float | None
    """The function ran or, if it has returned a future, until that was done."""
    wire: float | None
    """All the rest: sending, the way there and back, and waking up the threads that read."""
    outcome: str
    began: float
    """When, in seconds since the recording began."""


class SlowestCalls(list[CallTime]):
    """The slowest calls, the slowest first. ``print`` shows a table."""

    def __str__(self) -> str:
        head = ("call", "id", "at", "time", "encode", "queue", "run", "wire", "outcome")
        rows = [
            (
                found.name,
                found.call,
                duration(found.began),
                *map(duration, (found.seconds, found.encode, found.queue, found.run, found.wire)),
                found.outcome,
            )
            for found in self
        ]
        return table(head, rows) if rows else "No calls."


def call_times(calls: Iterable[Call], began: float) -> Iterator[CallTime]:
    """Where the time of each call of the program went."""
    for call in calls:
        client, served = call.client, call.served
        if client is None or client.system:
            continue
        seconds = client.ended - client.began
        encode = client.encoded - client.began + client.ended - client.answered
        queue = run = wire = None
        if served is not None:
            answering = served.ended - served.returned
            later = served.is_answered_later
            encode += served.decoded - served.started + (0.0 if later else answering)
            queue = served.started - served.arrived
            run = served.returned - served.decoded + (answering if later else 0.0)
            if served.outcome == UNFINISHED:
                # It goes on after its caller has given up, or was asked a moment later.
                queue = min(queue, seconds - encode)
                run = min(run, seconds - encode - queue)
            wire = seconds - encode - queue - run
            if wire < 0:  # the callee noted that the answer was sent when the caller had it already
                encode, wire = max(0.0, encode + wire), 0.0
        name = call_name(client.kind, client.function, call.caller, call.callee)
        yield CallTime(call.id, name, seconds, encode, queue, run, wire, client.outcome, client.began - began)


def missing_parts(workers: Iterable[Worker], missing: Mapping[str, str]) -> dict[str, str]:
    """By worker, what is missing of its recording."""
    found = dict(missing)
    for worker in workers:
        recorded = worker.recorded
        problems = list(recorded.problems)
        if recorded.dropped:
            problems.append(f"{recorded.dropped:,} events after the first {len(recorded.events):,}")
        if recorded.dropped_unfinished:
            problems.append(f"{recorded.dropped_unfinished:,} more calls that had not ended")
        if recorded.dropped_operators:
            problems.append(f"{recorded.dropped_operators:,} operators after the first {len(recorded.operators):,}")
        if problems:
            found[worker.name] = "; ".join(problems)
    return found
