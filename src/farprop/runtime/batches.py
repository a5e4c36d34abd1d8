"""Operations on references on their way to other workers: one batch at a time to each, sent again until answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from farprop.errors import ProtocolError
from farprop.protocol.references.messages import Batch, Reply, pack_operations
from farprop.runtime.links import FutureCall
from farprop.wire.dialect import Dialect
from farprop.wire.frames import ANSWER, Frame

_log = logging.getLogger("farprop.references")

COMPANY_SECONDS = 0.005  # operations that have no hurry wait so long for others
_BATCH_SECONDS = 10.0
_FIRST_WAIT, _LAST_WAIT = 0.02, 1.0
_now = time.monotonic


class Courier(Protocol):
    """What the references need of their worker."""

    dialect: Dialect

    def name_of_rank(self, rank: int) -> str: ...

    def send_batch(self, rank: int, number: int, operations: bytes, call: FutureCall) -> None:
        """Send it from a thread that may block; raises like any call."""

    def is_ready(self, rank: int) -> bool:
        """Whether ``send_batch`` would not block."""

    def submit(self, function: Callable[..., None], *args: Any) -> None: ...

    def set_alarm(self, when: float) -> None: ...

    def nudge(self, when: float) -> None:
        """As ``set_alarm``, for finalisers: takes no lock."""

    def look_after(self, rank: int) -> None:
        """Something is wrong with this worker: find out whether it lives."""


class _BatchCall(FutureCall):
    quick = True
    __slots__ = ("_batches", "_number", "_peer")

    def __init__(self, batches: Batches, peer: int, number: int) -> None:
        super().__init__(_BATCH_SECONDS)
        self._batches = batches
        self._peer = peer
        self._number = number

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        if frame is not None and frame.kind == ANSWER:
            self._batches.take_answer(self._peer, self._number, frame)
        else:
            self._batches.unanswered(self._peer)


class Batches:
    """``outgoing(peer)`` says what to send, ``replied(peer, reply)`` hears what became of it."""

    def __init__(
        self,
        courier: Courier,
        outgoing: Callable[[int], Batch | None],
        replied: Callable[[int, Reply], None],
    ) -> None:
        self._courier = courier
        self._outgoing = outgoing
        self._replied = replied
        self._lock = threading.Lock()
        self._due = 0.0  # when to send what waits for company
        self._waiting: set[int] = set()  # workers that something waits for
        self._sending: set[int] = set()  # workers that a batch is on its way to
        self._retries: dict[int, float] = {}  # when to send again
        self._waits: dict[int, float] = {}  # how long the last wait was, to wait longer next time
        self._closed = False

    @property
    def under_way(self) -> int:
        return len(self._sending) + len(self._retries)

    def send_later(self, peer: int) -> None:
        with self._lock:
            self._waiting.add(peer)
            if self._due:
                return
            due = self._due = _now() + COMPANY_SECONDS
        self._courier.set_alarm(due)

    def send(self, peer: int) -> None:
        with self._lock:
            if peer in self._sending or peer in self._retries or self._closed:
                return  # what is to be said goes with the next one
            self._sending.add(peer)
        try:
            if self._courier.is_ready(peer):
                self._transmit(peer)
            else:
                self._courier.submit(self._transmit, peer)
        except BaseException:
            self._sending.discard(peer)
            raise

    def _transmit(self, peer: int) -> None:
        batch = self._outgoing(peer)
        if batch is None:
            self._go_on(peer)
            return
        try:
            operations = pack_operations(batch.operations)
            self._courier.send_batch(peer, batch.number, operations, _BatchCall(self, peer, batch.number))
        except Exception as error:
            _log.info("can't send operations on references to worker %d: %s", peer, error)
            self.unanswered(peer)

    def take_answer(self, peer: int, number: int, frame: Frame) -> None:
        try:
            results = self._courier.dialect.decode_value(frame.meta, frame.buffers, frame.flags)
            if type(results) is not bytes:
                raise ProtocolError(f"it should be bytes, and is a {type(results).__name__}")
        except Exception as error:
            _log.error("worker %d answers operations on references with nonsense: %s", peer, error)
            self.unanswered(peer)
            return
        self.answered(peer, Reply(number, results))

    def answered(self, peer: int, reply: Reply) -> None:
        # First of all: until it is taken in, whoever may send would send the same batch again.
        self._replied(peer, reply)
        with self._lock:
            self._waits.pop(peer, None)
        self._go_on(peer)

    def _go_on(self, peer: int) -> None:
        """Nothing is on its way to this worker any more. Others may have left it to us to send what came meanwhile."""
        with self._lock:
            self._sending.discard(peer)
        if self._outgoing(peer) is not None:
            self.send(peer)

    def unanswered(self, peer: int) -> None:
        """It may have come or not: it is sent again, with the same number."""
        with self._lock:
            if peer not in self._sending or self._closed:
                return
            self._sending.discard(peer)
            wait = self._waits[peer] = min(2 * self._waits.get(peer, _FIRST_WAIT / 2), _LAST_WAIT)
            when = self._retries[peer] = _now() + wait
        self._courier.set_alarm(when)
        self._courier.look_after(peer)

    def expire(self, now: float) -> float:
        """Send what is due; when to look again (0: not)."""
        with self._lock:
            ready = [peer for peer, when in self._retries.items() if when <= now]
            for peer in ready:
                del self._retries[peer]
            if self._due and self._due <= now:
                self._due = 0.0
                ready.extend(self._waiting)
                self._waiting.clear()
            times = [*self._retries.values(), *([self._due] if self._due else [])]
        for peer in ready:
            self.send(peer)
        return min(times, default=0.0)

    def forget(self, peer: int) -> None:
        """The worker is dead."""
        with self._lock:
            self._sending.discard(peer)
            self._retries.pop(peer, None)
            self._waits.pop(peer, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._retries.clear()
