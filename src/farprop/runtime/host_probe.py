"""Finds out whether the host at the other end of a connection has vanished, while somebody waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from farprop.errors import ConnectionLostError
from farprop.protocol.host_liveness import PROBE_SECONDS, HostState
from farprop.protocol.pending_calls import PendingCalls
from farprop.runtime.event_loop import EventLoop

_now = time.monotonic


class HostProbe:
    """Looks every ``PROBE_SECONDS`` while calls are open; ``is_due`` says that it will, or that nothing needs it to.

    Args:
        loop: calls it when it is time.
        lock: the connection's.
        calls: its open calls.
        probe: asks the kernel about the connection.
        lose: says that the connection is lost, and why.
    """

    def __init__(
        self,
        loop: EventLoop,
        lock: AbstractContextManager[Any],
        calls: PendingCalls[Any],
        probe: Callable[[], HostState],
        lose: Callable[[str], None],
    ) -> None:
        self.is_due = True
        self.is_closed = False  # the connection is lost
        self._loop = loop
        self._lock = lock
        self._calls = calls
        self._probe = probe
        self._lose = lose
        self._keeps_on = False  # also while no calls are open

    def soon(self) -> None:
        """A call is open. Called under the lock, if nothing is due."""
        self._loop.call_at(_now() + PROBE_SECONDS, self._look)
        self.is_due = True

    def keep_on(self) -> None:
        """Look although no calls are open."""
        with self._lock:
            self._keeps_on = True
            if not self.is_due and not self.is_closed:
                self.soon()

    def _look(self) -> None:
        """Called by the loop."""
        with self._lock:
            if self.is_closed or not (len(self._calls) or self._keeps_on):
                self.is_due = False
                return
        try:
            state = self._probe()
        except ConnectionLostError as error:
            self._lose(str(error))
            return
        if state is HostState.VANISHED:
            self._lose("its host does not answer any more")
            return
        self._loop.call_at(_now() + PROBE_SECONDS, self._look)
