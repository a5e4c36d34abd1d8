"""Records all workers of a job: begins, renews and ends the recording on each, and fetches what they have noted."""

from __future__ import annotations

import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from farprop.errors import FarpropError, ProtocolError, UsageError
from farprop.protocol.inspection import Member
from farprop.protocol.recording import (
    MAX_RECORDING_BYTES,
    RENEW_SECONDS,
    SAME_CLOCK,
    Begin,
    Chunk,
    ClockOffset,
    Command,
    CommonClock,
    Drop,
    End,
    Fetch,
    Recorded,
    Refused,
    Renew,
    Reply,
    State,
    unpack,
)

_ASK_SECONDS = 3.0
_READY_SECONDS = 60.0  # Kineto, and the encoding of a large recording, may take so long
_AGAIN_SECONDS = 0.02


class Asker(Protocol):
    """How whoever records reaches the workers."""

    clock: str
    """Which monotonic clock this process has."""

    def members(self) -> list[Member]:
        """The workers of the job."""

    def ask(self, worker: str, command: Command, seconds: float) -> Reply:
        """Give a command to a worker; raises ``FarpropError`` or ``OSError`` if it can't be reached."""

    def measure(self, worker: str, seconds: float) -> ClockOffset:
        """Measure how much the clock of a worker is ahead of this process's."""

    def why_silent(self, member: Member, error: Exception) -> str:
        """Why a worker could not be reached, for people."""

    def blocked(self) -> AbstractContextManager[object]:
        """For the time in which this thread waits for workers."""


@dataclass(frozen=True)
class WorkerTrace:
    """What one worker has recorded, and how its clock is read."""

    member: Member
    recorded: Recorded
    clock: CommonClock


class Session:
    """One recording of a job. ``begin``, then ``end`` or ``cancel``.

    Args:
        asker: reaches the workers.
        operators: whether torch's operators are recorded, too.
        max_events: how many events, and how many operators, a worker keeps.
    """

    def __init__(self, asker: Asker, operators: bool, max_events: int) -> None:
        self.missing: dict[str, str] = {}
        """By worker, why nothing is known of it."""
        self._asker = asker
        self._id = secrets.token_hex(8)
        self._operators = operators
        self._max_events = max_events
        self._members: dict[str, Member] = {}
        self._first: dict[str, ClockOffset | None] = {}  # by worker that records; None if its clock is ours
        self._over = threading.Event()

    def begin(self) -> None:
        """Begin on all workers.

        Raises:
            UsageError: somebody else records the job.
        """
        self._members = {member.name: member for member in self._asker.members()}
        try:
            self._begin()
        except BaseException:
            self.cancel()
            raise

    def _begin(self) -> None:
        command = Begin(self._id, self._operators, self._max_events)
        refusals: dict[str, str] = {}

        def begin(worker: str) -> None:
            reply = self._asker.ask(worker, command, _ASK_SECONDS)
            if isinstance(reply, Refused) and reply.is_busy:
                refusals[worker] = reply.reason
                return
            if isinstance(reply, Refused):
                raise FarpropError(reply.reason)
            if not isinstance(reply, State):
                raise ProtocolError("it gave an answer to another question")
            self._first[worker] = None
            self._await(worker, Renew(self._id), reply)
            self._first[worker] = self._offset(worker, reply)

        self._each(self._members, begin)
        if refusals:
            worker, reason = min(refusals.items())
            raise UsageError(f"{worker} is recorded already: {reason}")
        threading.Thread(target=self._renew, name="farprop-profile", daemon=True).start()

    def _offset(self, worker: str, state: State) -> ClockOffset | None:
        is_ours = bool(state.clock) and state.clock == self._asker.clock
        return None if is_ours else self._asker.measure(worker, _ASK_SECONDS)

    def _await(self, worker: str, command: Command, reply: Reply) -> Reply:
        """Ask again until the worker has done what it was asked for."""
        deadline = time.monotonic() + _READY_SECONDS
        while isinstance(reply, State) and not reply.is_ready:
            if time.monotonic() > deadline:
                raise FarpropError(f"it was not ready within {_READY_SECONDS:.0f} s")
            time.sleep(_AGAIN_SECONDS)
            reply = self._asker.ask(worker, command, _ASK_SECONDS)
        if isinstance(reply, Refused):
            raise FarpropError(reply.reason)
        return reply

    def _renew(self) -> None:
        while not self._over.wait(RENEW_SECONDS):
            # One that does not answer now may do so the next time, or is found missing at the end.
            _in_threads(self._first, lambda worker: self._asker.ask(worker, Renew(self._id), _ASK_SECONDS))

    def end(self) -> list[WorkerTrace]:
        """End on all workers; returns what they have recorded, by rank. ``missing`` says of whom there is nothing."""
        self._over.set()
        found: dict[str, WorkerTrace] = {}

        def end(worker: str) -> None:
            reply = self._asker.ask(worker, End(self._id), _ASK_SECONDS)
            if isinstance(reply, Refused):
                raise FarpropError(reply.reason)
            first = self._first[worker]
            last = None if first is None else self._asker.measure(worker, _ASK_SECONDS)
            recorded = self._fetched(worker)
            clock = SAME_CLOCK if first is None or last is None else CommonClock(first, last)
            found[worker] = WorkerTrace(self._members[worker], recorded, clock)

        self._each(list(self._first), end)
        for member in self._late():
            self.missing[member.name] = "joined after the recording had begun"
        return sorted(found.values(), key=lambda trace: trace.member.rank)

    def _late(self) -> list[Member]:
        try:
            return [member for member in self._asker.members() if member.name not in self._members]
        except (FarpropError, OSError):
            return []

    def _fetched(self, worker: str) -> Recorded:
        data = b""
        size = 1
        while len(data) < size:
            command = Fetch(self._id, len(data))
            reply = self._await(worker, command, self._asker.ask(worker, command, _ASK_SECONDS))
            if not isinstance(reply, Chunk) or not reply.data or reply.size > MAX_RECORDING_BYTES:
                raise ProtocolError("what it has recorded can't be read")
            data += reply.data
            size = reply.size
        unpacking = zlib.decompressobj()
        try:
            plain = unpacking.decompress(data, MAX_RECORDING_BYTES)
        except zlib.error as error:
            raise ProtocolError(f"what it has recorded can't be read: {error}") from error
        if unpacking.unconsumed_tail:
            raise ProtocolError("what it has recorded is too large")
        recorded: Recorded = unpack(plain, Recorded)
        return recorded

    def cancel(self) -> None:
        """End on all workers, without a result."""
        self._over.set()
        _in_threads(self._first, lambda worker: self._asker.ask(worker, Drop(self._id), _ASK_SECONDS))

    def _each(self, workers: Iterable[str], do: Callable[[str], None]) -> None:
        """Do something for all workers at the same time. Those that can't be reached are missing."""
        with self._asker.blocked():
            errors = _in_threads(workers, do)
        for worker, error in errors.items():
            self._first.pop(worker, None)
            self.missing[worker] = self._asker.why_silent(self._members[worker], error)


def _in_threads(workers: Iterable[str], do: Callable[[str], object]) -> dict[str, Exception]:
    """Do something for all workers at the same time; returns the errors by worker."""
    errors: dict[str, Exception] = {}

    def run(worker: str) -> None:
        try:
            do(worker)
        except Exception as error:
            errors[worker] = error

    threads = [threading.Thread(target=run, args=(name,), name="farprop-ask", daemon=True) for name in list(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
