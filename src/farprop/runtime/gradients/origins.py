"""The passes that were started here: who waits for them, and what went wrong with them."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from farprop.protocol.passes import Action, PassId


class Origin:
    """What the thread that called ``backward`` waits for."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.deadline = time.monotonic() + timeout if timeout else 0.0
        self.error: BaseException | None = None
        self._events: deque[Action] = deque()
        self._bell = threading.Lock()  # rings when there is something to look at
        self._bell.acquire()

    def tell(self, action: Action) -> None:
        self._events.append(action)
        self._ring()

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
        self._ring()

    def _ring(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            pass  # it has rung, and nobody has looked yet

    def next(self, blocked: Any) -> Action | None:
        """What happened; raises if something went wrong, None if time is up. ``blocked()`` is for waiting."""
        while self.error is None:
            if self._events:
                return self._events.popleft()
            left = self.deadline - time.monotonic() if self.deadline else -1.0
            if self.deadline and left <= 0:
                return None
            with blocked():
                self._bell.acquire(timeout=left)
        raise self.error


class Origins:
    """By the pass's id."""

    def __init__(self) -> None:
        self._origins: dict[PassId, Origin] = {}

    def start(self, pass_id: PassId, timeout: float) -> Origin:
        origin = self._origins[pass_id] = Origin(timeout)
        return origin

    def end(self, pass_id: PassId) -> None:
        del self._origins[pass_id]

    def tell(self, pass_id: PassId, action: Action) -> None:
        origin = self._origins.get(pass_id)
        if origin is not None:
            origin.tell(action)

    def fail(self, pass_id: PassId, error: BaseException) -> None:
        """If the pass has ended, nobody listens."""
        origin = self._origins.get(pass_id)
        if origin is not None:
            origin.fail(error)
