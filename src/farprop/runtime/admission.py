"""Admission control: limits on queued requests, callers that don't read their answers, and calls during a barrier."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable

from farprop.errors import OverloadedError
from farprop.locks import make_lock
from farprop.runtime.rate_limited_log import RateLimitedLog
from farprop.runtime.request_queue import Request
from farprop.transport.connection import Connection
from farprop.wire.function_names import shown_name
from farprop.wire.message import Message

_log = logging.getLogger(__name__)

MOST_REQUESTS = 300_000  # queued requests of one caller: more than a caller sends that keeps to its own limit


class AdmissionControl:
    """Refuses requests over the limits, and pauses callers that don't read their answers.

    Requests over the limits are read and refused. They can't be left unread, because farprop's own requests come on the
    same connection and must not wait.

    A caller that doesn't read its answers is paused: its requests are neither read nor run until it does. This delays
    nothing but the caller itself.

    Args:
        worker: the name of this worker.
        most_bytes: the queued bytes of all callers together. A caller that has nothing queued may queue one request
            whatever its size, so that a flood of others does not lock it out.
        most_unread: the unread bytes of answers at which a caller is paused. Running requests may add to them.
    """

    def __init__(self, worker: str, most_bytes: int, most_unread: int) -> None:
        self._worker = worker
        self._most_bytes = most_bytes
        self._most_unread = most_unread
        self._lock = make_lock("admission")
        self._counts: defaultdict[int, int] = defaultdict(int)  # queued requests by the caller's rank
        self._bytes = 0
        self._held: dict[Connection, list[Request]] = {}
        self._refusals = RateLimitedLog(_log)

    def admit(self, connection: Connection, message: Message) -> OverloadedError | None:
        """Count a request as queued until ``begin``; returns the error to answer if it is over a limit."""
        size = message.memory
        rank = connection.rank
        with self._lock:
            count, waiting = self._counts[rank], self._bytes
            if count < MOST_REQUESTS and (waiting + size <= self._most_bytes or not count):
                self._counts[rank] = count + 1
                self._bytes = waiting + size
                return None
        if count < MOST_REQUESTS:
            what = f"requests of {waiting} bytes wait there, and the limit is {self._most_bytes}"
        else:
            what = f"{count} requests of {connection.peer} wait there, which is the limit"
        error = OverloadedError(
            f"{self._worker} did not run {shown_name(message.name)}: {what}. Wait for "
            f"answers before you send more, or give {self._worker} more threads (num_worker_threads)."
        )
        self._refusals.warning("refused a request of %s: %s", connection.peer, error)
        return error

    def begin(self, connection: Connection, message: Message) -> None:
        """A request leaves the queue and runs."""
        size = message.memory
        with self._lock:
            self._counts[connection.rank] -= 1
            self._bytes -= size

    def pause(self, connection: Connection) -> None:
        """Note that the server has stopped reading from this connection."""
        with self._lock:
            self._held.setdefault(connection, [])

    def hold(self, connection: Connection, request: Request) -> bool:
        """Hold back a request if its caller doesn't read its answers; returns whether it was held back."""
        with self._lock:
            # Checked again under the lock: the sender of answers calls ``resume`` after it has changed this number.
            if connection.outbox_bytes <= self._most_unread or connection.closed:
                return False
            self._held.setdefault(connection, []).append(request)
            return True

    def held(self) -> list[Request]:
        """The requests that are held back, for inspection."""
        with self._lock:
            return [request for requests in self._held.values() for request in requests]

    def resume(self, connection: Connection) -> list[Request] | None:
        """The caller has read answers, or is gone: returns its requests to run now, or None if it was not paused."""
        if connection.outbox_bytes > self._most_unread // 2 and not connection.closed:
            return None
        with self._lock:  # before reading the table: another thread may be inside ``hold``
            return self._held.pop(connection, None)


class BarrierGate:
    """Holds back requests of workers that have left a barrier which this worker has not left yet.

    Programs often register something right after a barrier, and then call the other workers. The barrier may end a
    moment later at a callee; without the gate it would run the call before it has registered anything. ``submit``
    queues a request.
    """

    def __init__(self, submit: Callable[[Request], None]) -> None:
        self.is_shut = False  # checked by every request, without the lock
        self._submit = submit
        self._lock = make_lock("barrier_gate")
        self._barriers: dict[Hashable, tuple[frozenset[str], frozenset[bytes]]] = {}
        self._held: list[tuple[str, bytes, Request]] = []

    def shut(self, key: Hashable, workers: frozenset[str], but_for: frozenset[bytes]) -> None:
        """Hold back the calls of these workers, except for calls of the functions in ``but_for``.

        Args:
            key: identifies the barrier.
            workers: the names of the other workers in it.
            but_for: names of the functions that the barrier itself calls.
        """
        with self._lock:
            self._barriers[key] = workers, but_for
            self.is_shut = True

    def open(self, key: Hashable) -> None:
        """The barrier has ended: run the requests that no other barrier holds back."""
        if not self.is_shut:
            return
        with self._lock:
            self._barriers.pop(key, None)
            self.is_shut = bool(self._barriers)
            held, self._held = self._held, []
            free: list[tuple[str, bytes, Request]] = []
            for entry in held:
                (self._held if self._is_held(*entry[:2]) else free).append(entry)
        for _, _, request in free:
            self._submit(request)

    def hold(self, worker: str, function: bytes, request: Request) -> bool:
        """Hold back a request if a barrier requires it, to queue it later. Returns whether it was held back."""
        with self._lock:
            if not self._is_held(worker, function):
                return False
            self._held.append((worker, function, request))
            return True

    def held(self) -> list[Request]:
        """The requests that are held back, for inspection."""
        with self._lock:
            return [request for _, _, request in self._held]

    def _is_held(self, worker: str, function: bytes) -> bool:
        return any(worker in workers and function not in but for workers, but in self._barriers.values())
