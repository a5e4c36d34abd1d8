"""A wrapper around a connection that fails, loses or delays messages, or cuts it, as a fault policy decides."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from farprop.errors import InjectedFaultError
from farprop.locks import make_lock
from farprop.transport.connection import Connection
from farprop.wire.message import CANCEL, NOTICE, Message


class FaultAction(enum.Enum):
    FAIL = "the sender gets an InjectedFaultError, and nothing is sent"
    LOSE = "nothing is sent, and the sender gets no error"
    DELAY = "it is sent later"
    CUT = "the connection is closed instead"


class FaultDecision(NamedTuple):
    action: FaultAction
    seconds: float = 0.0


# Called with the peer's name and a message for it; None sends the message.
FaultPolicy = Callable[[str, Message], FaultDecision | None]


class FaultyConnection:
    """Applies a fault policy to ``send``. All else is delegated to the wrapped connection."""

    def __init__(self, inner: Connection, policy: FaultPolicy) -> None:
        self._inner = inner
        self._policy = policy
        self._lock = make_lock("faulty_connection")
        self._timers: set[threading.Timer] | None = set()  # None after ``close``

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(self, message: Message, more: bool = False) -> None:
        inner = self._inner
        decision = None if message.kind in (NOTICE, CANCEL) else self._policy(inner.peer, message)
        if decision is None:
            inner.send(message, more)
        elif decision.action is FaultAction.FAIL:
            raise InjectedFaultError(f"A message to {inner.peer} failed, because a fault plan says so.")
        elif decision.action is FaultAction.DELAY:
            self._send_later(decision.seconds, message)
        elif decision.action is FaultAction.CUT:
            inner.hang_up()

    def _send_later(self, delay: float, message: Message) -> None:
        def send() -> None:
            with self._lock:
                if self._timers is not None:
                    self._timers.discard(timer)
            try:
                self._inner.send(message)
            except ConnectionError:
                pass  # the connection was closed meanwhile

        timer = threading.Timer(delay, send)
        timer.daemon = True
        timer.name = f"farprop-delayed-{self._inner.peer}"
        with self._lock:
            if self._timers is not None:
                self._timers.add(timer)
                timer.start()

    def close(self) -> bool:
        with self._lock:
            timers, self._timers = self._timers or set(), None
        for timer in timers:
            timer.cancel()
            if timer is not threading.current_thread():
                timer.join()
        return self._inner.close()
