"""A connection that wraps another one, and fails, loses, delays or cuts at what a plan says."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from farprop.errors import InjectedFaultError
from farprop.transport.connection import Connection
from farprop.wire.codec import Encoded
from farprop.wire.frames import NOTICE


class Action(enum.Enum):
    FAIL = "the sender gets an InjectedFaultError, and nothing is sent"
    LOSE = "nothing is sent, and nobody is told"
    DELAY = "it is sent later"
    CUT = "the connection is closed instead"


class Verdict(NamedTuple):
    action: Action
    seconds: float = 0.0


# The peer's name, and what ``Connection.send`` gets: kind, flags, call id, function name, message.
Judge = Callable[[str, int, int, int, bytes, Encoded], Verdict | None]


class FaultyConnection:
    """Everything that is not sending goes straight to the other one."""

    def __init__(self, inner: Connection, judge: Judge) -> None:
        self._inner = inner
        self._judge = judge
        self._lock = threading.Lock()
        self._timers: set[threading.Timer] | None = set()  # None once it is closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def send(
        self, kind: int, flags: int, call_id: int, seconds: float, name: bytes, encoded: Encoded, more: bool = False
    ) -> None:
        inner = self._inner
        verdict = None if kind == NOTICE else self._judge(inner.peer, kind, flags, call_id, name, encoded)
        if verdict is None:
            inner.send(kind, flags, call_id, seconds, name, encoded, more)
        elif verdict.action is Action.FAIL:
            raise InjectedFaultError(f"A message to {inner.peer} failed, because a fault plan says so.")
        elif verdict.action is Action.DELAY:
            self._send_later(verdict.seconds, (kind, flags, call_id, seconds, name, encoded))
        elif verdict.action is Action.CUT:
            inner.hang_up()

    def _send_later(self, delay: float, message: tuple[Any, ...]) -> None:
        def send() -> None:
            with self._lock:
                if self._timers is not None:
                    self._timers.discard(timer)
            try:
                self._inner.send(*message)
            except ConnectionError:
                pass  # closed meanwhile

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
