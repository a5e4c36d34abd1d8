"""Backpressure: callers wait while a connection has too much to send, or too many bytes of calls without an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from farprop.config import Settings
from farprop.errors import OverloadedError, not_run
from farprop.protocol.pending_calls import PendingCalls
from farprop.runtime.future_call import timeout_error
from farprop.runtime.sync import Waker
from farprop.runtime.thread_pool import ThreadPool, coroutine_of, this_thread
from farprop.wire.message import SYSTEM, Message

LOOK_SECONDS = 0.5  # a thread that sleeps looks this often whether a wake-up got lost

_now = time.monotonic


class Room:
    """What a connection may still send.

    Calls wait if ``outbox_bytes()`` is above ``most_outbox``, or ``calls.bytes`` above ``most_in_flight``; callers look
    at these themselves, because most calls don't have to wait.

    Args:
        peer: the worker at the other end.
        lock: the connection's.
        calls: its open calls.
        outbox_bytes: what it has not sent yet.
        threads: the worker's.
        settings: the limits, and whether to wait at them.
    """

    def __init__(
        self,
        peer: str,
        lock: AbstractContextManager[Any],
        calls: PendingCalls[Any],
        outbox_bytes: Callable[[], int],
        threads: ThreadPool,
        settings: Settings,
    ) -> None:
        self.most_outbox = settings.outbox_bytes
        self.most_in_flight = settings.in_flight_bytes
        self._may_wait = settings.when_full == "wait"
        self._peer = peer
        self._lock = lock
        self._calls = calls
        self._outbox_bytes = outbox_bytes
        self._threads = threads
        self.is_closed = False  # the connection is lost: nobody has to wait
        self.waiters: dict[Waker, bool] = {}  # those who wait, and whether their calls are nested

    def wait(self, message: Message, pooled: bool, timeout: float | None) -> float | None:
        """Wait until a request may be sent, or raise if the settings say so.

        A nested call waits for nothing but the outbox, and farprop's own calls wait for nothing at all: the answers
        that would make room may depend on them.

        Args:
            message: the request.
            pooled: whether this is a thread of the pool.
            timeout: in seconds; None for no timeout.

        Returns:
            The seconds that are left.
        """
        if message.flags & SYSTEM:
            return timeout
        # With the third: on a thread that a coroutine has its work done on, by ``asyncio.to_thread``.
        nested = pooled or getattr(this_thread, "makes_nested_calls", False) or coroutine_of.get() is not None
        if not nested and not self._may_wait:
            error = OverloadedError(
                f"A call to {self._peer} was not sent: calls of {self._calls.bytes} bytes have no answer yet, of which "
                f"{self._outbox_bytes()} bytes are not sent. The limits are FARPROP_IN_FLIGHT_BYTES="
                f"{self.most_in_flight} and FARPROP_OUTBOX_BYTES={self.most_outbox}. Wait for answers before you "
                "send more, or set FARPROP_WHEN_FULL=wait."
            )
            raise not_run(error)
        waker = Waker()
        deadline = None if timeout is None else _now() + timeout
        with self._threads.blocked():
            while True:
                with self._lock:
                    if self.is_closed or self._is_there(nested):
                        break
                    self.waiters[waker] = nested
                # An interrupt of another thread may have lost the wake-up.
                left = LOOK_SECONDS if deadline is None else deadline - _now()
                if left <= 0:
                    raise not_run(timeout_error(self._peer, cast(float, timeout)))
                waker.wait(timeout=min(LOOK_SECONDS, left))
        return None if deadline is None else max(0.0, deadline - _now())

    def _is_there(self, nested: bool) -> bool:
        # Half of the limit, so that callers who wait are not woken for each answer.
        return self._outbox_bytes() <= self.most_outbox // 2 and (
            nested or self._calls.bytes <= self.most_in_flight // 2
        )

    def wake(self) -> None:
        """Calls have ended, or bytes were sent: wake those who wait for that. Called under the lock."""
        for waker, nested in list(self.waiters.items()):
            if self.is_closed or self._is_there(nested):
                waker.wake()
                del self.waiters[waker]
