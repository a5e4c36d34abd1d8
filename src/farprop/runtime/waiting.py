"""Requests that wait for their turn: how many may, and those of callers that don't read their answers."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable

from farprop.errors import OverloadedError
from farprop.runtime.sparing import SparingLog
from farprop.transport.connection import Connection
from farprop.wire.frames import Frame

_log = logging.getLogger("farprop.serving")

MOST_REQUESTS = 100_000  # of one caller
MOST_BYTES = 1 << 30  # of all callers together; or the largest message that is taken, if that is more
MOST_UNREAD = 64 << 20  # bytes of answers that a caller does not take; what is already there may come on top
_OVERHEAD = 1024  # what a request takes beside its bytes, roughly


class Waiting:
    """What is over the limits is refused, and never left unread: the answers that a worker waits for come on other
    connections, but farprop's own requests come on the same.

    A caller that does not take its answers is another matter: nothing that it wants can be lost to it. Its requests
    are neither read nor run until it does.
    """

    def __init__(self, worker: str, max_message_bytes: int) -> None:
        self._worker = worker
        self._most_bytes = max(MOST_BYTES, max_message_bytes)
        self._lock = threading.Lock()
        self._counts: defaultdict[int, int] = defaultdict(int)  # by the caller's rank
        self._bytes = 0
        self._held: dict[Connection, list[Callable[[], None]]] = {}
        self._refusals = SparingLog(_log)

    def admit(self, connection: Connection, frame: Frame) -> OverloadedError | None:
        """A request comes, and waits until ``begin``; the error if it can't."""
        size = _size_of(frame)
        rank = connection.rank
        with self._lock:
            count, waiting = self._counts[rank], self._bytes
            if count < MOST_REQUESTS and (waiting + size <= self._most_bytes or not waiting):
                self._counts[rank] = count + 1
                self._bytes = waiting + size
                return None
        if count < MOST_REQUESTS:
            what = f"requests of {waiting} bytes wait there, and {self._most_bytes} is the most"
        else:
            what = f"{count} requests of {connection.peer} wait there, which is the most"
        error = OverloadedError(
            f"{self._worker} did not run {frame.name.decode(errors='replace') or 'a function'}: {what}. Wait for "
            f"answers before you send more, or give {self._worker} more threads (num_worker_threads)."
        )
        self._refusals.warning("refused a request of %s: %s", connection.peer, error)
        return error

    def begin(self, connection: Connection, frame: Frame) -> None:
        """It waits no longer."""
        size = _size_of(frame)
        with self._lock:
            self._counts[connection.rank] -= 1
            self._bytes -= size

    def pause(self, connection: Connection) -> None:
        """Nothing is read from this one for now."""
        with self._lock:
            self._held.setdefault(connection, [])

    def hold(self, connection: Connection, run: Callable[[], None]) -> bool:
        """Whether a request has to wait because its caller does not take its answers."""
        with self._lock:
            # Only now is it sure: whoever sends the answers comes to ``resume`` after he has changed this number.
            if connection.outbox_bytes <= MOST_UNREAD or connection.closed:
                return False
            self._held.setdefault(connection, []).append(run)
            return True

    def resume(self, connection: Connection) -> list[Callable[[], None]] | None:
        """The caller has taken much, or is gone: its requests, which can run now; None if it was not waited for."""
        if connection.outbox_bytes > MOST_UNREAD // 2 and not connection.closed:
            return None
        with self._lock:  # before a look at what is held: somebody may be in the middle of ``hold``
            return self._held.pop(connection, None)


def _size_of(frame: Frame) -> int:
    size = len(frame.meta) + _OVERHEAD
    return size + sum(map(len, frame.buffers)) if frame.buffers else size
