"""Records what this worker does, for whoever records the whole job: ``farprop.profile``, or ``farprop trace``.

Rules that hold here:

- Commands return at once. What takes long (Kineto, encoding) is done by a thread, and whoever asked asks again.
- An event is noted with one append. What does not fit is counted, from the next look on.
- Nobody renews the lease: the recording ends by itself.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable

from farprop.errors import ConnectionLostError, UsageError
from farprop.locks import make_lock
from farprop.protocol.events import Event, discreet
from farprop.protocol.inspection import Member
from farprop.protocol.recording import (
    CHUNK_BYTES,
    MAX_EVENTS,
    Begin,
    Chunk,
    ClockOffset,
    Command,
    Drop,
    End,
    Fetch,
    Lease,
    Ping,
    Recorded,
    Refused,
    Renew,
    Reply,
    State,
    measure_offset,
    pack,
    unpack,
)
from farprop.runtime.membership import Membership
from farprop.runtime.open_calls import OpenCalls
from farprop.runtime.operators import OperatorRecording
from farprop.runtime.peers import Peers
from farprop.runtime.recorder import LateEvent, Recorder
from farprop.runtime.snapshots import member_of
from farprop.runtime.timers import TimerHandle
from farprop.transport.sockets import network_namespace
from farprop.wire.dialect import Dialect
from farprop.wire.message import ANSWER, Method

_log = logging.getLogger(__name__)
_now = time.monotonic

_LOOK_SECONDS = 0.1

LookForCalls = Callable[[], OpenCalls | None]
CallAt = Callable[[float, Callable[[], None]], TimerHandle]


class _Buffer:
    """The events of one recording.

    The listener is the ``append`` of a list, because every call pays for it. So somebody has to call ``look`` now and
    then: when the list is full, further events are counted and not kept.
    """

    def __init__(self, most: int, recorder: Recorder) -> None:
        self._most = most
        self._recorder = recorder
        self._events: list[LateEvent] = []
        self._counter = itertools.count()
        self._unsubscribe: Callable[[], None] | None = recorder.subscribe_late(self._events.append)
        self._is_full = self._has_ended = False

    def look(self) -> None:
        """Keep no more events if there are enough."""
        unsubscribe = self._unsubscribe
        if len(self._events) > self._most and not self._is_full and unsubscribe is not None:
            self._is_full = True
            self._unsubscribe = self._recorder.subscribe_late(self._count)
            unsubscribe()
            if self._has_ended:  # meanwhile, by another thread
                self.end()

    def _count(self, _: LateEvent) -> None:
        next(self._counter)  # atomic

    def end(self) -> None:
        """Note nothing any more. A second time does nothing."""
        self._has_ended = True
        unsubscribe, self._unsubscribe = self._unsubscribe, None
        if unsubscribe is not None:
            unsubscribe()

    def taken(self) -> tuple[list[LateEvent], int]:
        """What the events are made of, once, and how many there were beyond the limit."""
        events = self._events[: self._most]
        dropped = len(self._events) - len(events) + next(self._counter)
        self._events.clear()
        return events, dropped

    def clear(self) -> None:
        self._events.clear()


class _Recording:
    """One recording of this worker, from ``Begin`` to the last ``Fetch``."""

    def __init__(self, command: Begin, worker: str, recorder: Recorder, look: LookForCalls, discreet: bool) -> None:
        self.id = command.recording
        self._look_for_calls = look
        self._open_calls: OpenCalls | None = None
        self._worker = worker
        self._discreet = discreet
        most = max(0, min(command.max_events, MAX_EVENTS))
        self._problems: list[str] = []
        self._operators: OperatorRecording | None = None
        if command.operators and discreet:
            self._problems.append("torch's operators: workers of a restricted job don't tell each other theirs")
        elif command.operators:
            self._operators = OperatorRecording(worker, most)
            self._operators.start()
        self._threads = _thread_names()
        self._cpu = time.process_time()
        self._began = _now()
        self._ended = 0.0
        self._buffer = _Buffer(most, recorder)
        self._is_finishing = False
        self.data: bytes | None = None
        """What was recorded, packed and compressed, once it is ready."""

    @property
    def is_started(self) -> bool:
        return self._operators is None or self._operators.is_started

    def look(self) -> None:
        """To be called now and then."""
        self._buffer.look()

    def end(self) -> None:
        """Note nothing any more. ``data`` will be there. A second time does nothing."""
        if not self._is_finishing:
            # First: a call that ends before the buffer does is told, too. Otherwise it could be in neither.
            self._open_calls = self._look_for_calls()
            self._stop()

    def _stop(self) -> None:
        if not self._is_finishing:
            self._is_finishing = True
            self._buffer.end()
            self._ended = _now()
            self._cpu = time.process_time() - self._cpu
            threading.Thread(target=self._finish, name=f"farprop-record-{self._worker}", daemon=True).start()

    def drop(self) -> None:
        """Stop without a result."""
        self._buffer.clear()
        self._stop()

    def _finish(self) -> None:
        try:
            self.data = zlib.compress(pack(self._recorded()), 1)
        except Exception as error:
            _log.exception("%s: farprop could not pack what it has recorded", self._worker)
            empty = Recorded(self._began, self._ended, [], 0, [], 0, [f"everything: {error}"], {}, 0, 0.0)
            self.data = zlib.compress(pack(empty), 1)

    def _recorded(self) -> Recorded:
        operators = self._operators
        if operators is not None:
            operators.stop()
            if operators.problem:
                self._problems.append(operators.problem)
        told, dropped = self._buffer.taken()
        open_calls = self._open_calls
        unfinished = [] if open_calls is None else open_calls.events(self._began, self._ended, told)
        tell = discreet if self._discreet else _unchanged
        return Recorded(
            began=self._began,
            ended=self._ended,
            events=[tell(late.event()) for late in told],
            dropped=dropped,
            operators=[] if operators is None else operators.operators,
            dropped_operators=0 if operators is None else operators.dropped,
            problems=self._problems,
            threads={**self._threads, **_thread_names()},
            main_thread=os.getpid(),
            cpu_seconds=self._cpu,
            unfinished=list(map(tell, unfinished)),
            dropped_unfinished=0 if open_calls is None else open_calls.left_out,
        )


def _unchanged(event: Event) -> Event:
    return event


def _thread_names() -> dict[int, str]:
    names = {thread.native_id or 0: thread.name for thread in threading.enumerate()}
    names[os.getpid()] = threading.main_thread().name  # Python keeps the id of the parent's after a fork
    return names


class Recordings:
    """Takes commands about recordings, and gives them to other workers. Methods may be called from any thread."""

    def __init__(
        self, recorder: Recorder, membership: Membership, peers: Peers, dialect: Dialect, call_at: CallAt
    ) -> None:
        self._recorder = recorder
        self._own = membership.own.name
        self._membership = membership
        self._peers = peers
        self._dialect = dialect
        self._call_at = call_at
        self.look_for_calls: LookForCalls = lambda: None
        """Finds the calls that are open now. The agent sets it."""
        self._clock = network_namespace()
        self._lock = make_lock("recordings")
        self._lease = Lease()
        self._recording: _Recording | None = None

    # This worker

    def on_command(self, caller: int, data: bytes) -> bytes:
        """Another worker records the job."""
        name = self._membership.name_of(caller)
        return pack(self.handle(unpack(data, Command), name, discreet=self._dialect.restricted))

    def handle(self, command: Command, by: str, discreet: bool = False) -> Reply:
        """Do what a command says.

        Args:
            command: the command.
            by: who records, for error texts.
            discreet: whether to leave out what workers of a restricted job don't tell each other.
        """
        if isinstance(command, Ping):
            return State(_now(), self._clock)
        if isinstance(command, Begin):
            return self._begin(command, by, discreet)
        with self._lock:
            recording = self._recording
            if recording is None or not self._lease.renew(command.recording, _now()):
                return Refused("the recording has ended: nobody renewed it in time")
        if isinstance(command, Renew):
            return State(_now(), self._clock, recording.is_started)
        if isinstance(command, End):
            recording.end()
            return State(_now(), self._clock, recording.data is not None)
        if isinstance(command, Drop):
            self._forget(recording)
            recording.drop()
            return State(_now(), self._clock)
        return self._fetch(command, recording)

    def _begin(self, command: Begin, by: str, discreet: bool) -> Reply:
        with self._lock:
            reason = self._lease.begin(command.recording, by, _now())
            if reason is not None:
                return Refused(reason, is_busy=True)
            earlier, self._recording = self._recording, None
        if earlier is not None:
            earlier.drop()
        recording = _Recording(command, self._own, self._recorder, self.look_for_calls, discreet)
        with self._lock:
            self._recording = recording
        self._look_later(recording)
        return State(_now(), self._clock, recording.is_started)

    def _fetch(self, command: Fetch, recording: _Recording) -> Reply:
        data = recording.data
        if data is None:
            recording.end()
            return State(_now(), self._clock, is_ready=False)
        chunk = data[command.offset : command.offset + CHUNK_BYTES]
        if command.offset + len(chunk) >= len(data):
            self._forget(recording)
        return Chunk(chunk, len(data))

    def _forget(self, recording: _Recording) -> None:
        with self._lock:
            if self._recording is recording:
                self._recording = None
                self._lease.release()

    def _look_later(self, recording: _Recording) -> None:
        self._call_at(_now() + _LOOK_SECONDS, lambda: self._look(recording))

    def _look(self, recording: _Recording) -> None:
        """Called by the loop now and then: end a recording that nobody renews."""
        recording.look()
        with self._lock:
            if self._recording is not recording:
                return
            is_over = self._lease.left(_now()) <= 0
        if not is_over:
            self._look_later(recording)
            return
        self._forget(recording)
        recording.drop()
        _log.info("%s: nobody renewed the recording of this worker, so it has ended", self._own)

    def close(self) -> None:
        """This worker ends."""
        with self._lock:
            recording, self._recording = self._recording, None
        if recording is not None:
            recording.drop()

    # Other workers

    def members(self) -> list[Member]:
        """The workers of the job, by rank."""
        self._membership.refresh()
        return sorted(map(member_of, self._membership.entries.values()), key=lambda member: member.rank)

    def ask(self, worker: str, command: Command, seconds: float) -> Reply:
        """Give a command to another worker, or to this one.

        Raises:
            FarpropError: it can't be asked.
        """
        if worker == self._own:
            return self.handle(command, self._own)
        entry = self._membership.find(worker)
        if entry is None:
            raise UsageError(f"{worker} is not a worker of this job.")
        message = self._dialect.encode_call(None, (pack(command),), {})
        answer = self._peers.call_method(entry.rank, Method.RECORD, message, seconds, system=True)
        if answer.kind != ANSWER:
            raise self._dialect.decode_failure(answer.payload)
        reply: Reply = unpack(self._dialect.decode_value(answer.payload, answer.buffers, answer.flags), Reply)
        return reply

    def measure(self, worker: str, seconds: float) -> ClockOffset:
        """Measure how much the clock of another worker is ahead of this one's.

        Raises:
            FarpropError: it can't be asked.
        """

        def ask() -> float:
            reply = self.ask(worker, Ping(), seconds)
            if not isinstance(reply, State):
                raise ConnectionLostError(f"{worker} does not tell its clock.")
            return reply.now

        return measure_offset(ask, _now)
