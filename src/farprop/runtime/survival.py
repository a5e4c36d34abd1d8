"""Finding out whether a worker that something is wrong with is alive.

It is dialled. If it answers, it lives. If its address refuses us, or belongs to somebody else, it is dead. If it can't
be reached at all, it is dialled again for a while, and then it is taken for dead. One that takes connections and does
not answer is stopped, or slow, and not dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from farprop.errors import AuthenticationError, ConnectionLostError, ProtocolError, RpcTimeoutError, UsageError
from farprop.runtime.dialling import SomebodyElse, Unresponsive

_log = logging.getLogger("farprop.agent")

PATIENCE = 20.0
_PAUSE = 0.5


class Survival:
    """``dial(rank, timeout)`` raises if it can't; ``died(rank)`` is called for a worker that is dead."""

    def __init__(
        self,
        dial: Callable[..., object],
        died: Callable[[int], None],
        submit: Callable[..., None],
        set_alarm: Callable[[float], None],
    ) -> None:
        self._dial = dial
        self._died = died
        self._submit = submit
        self._set_alarm = set_alarm
        self._lock = threading.Lock()
        self._suspects: dict[int, tuple[float, float]] = {}  # when to take it for dead, when to dial again
        self._dialling: dict[int, bool] = {}  # whether something went wrong since the dialling began
        self._closed = False

    def suspect(self, rank: int) -> None:
        with self._lock:
            if rank in self._dialling:
                self._dialling[rank] = True
            if self._closed or rank in self._dialling or rank in self._suspects:
                return
            self._dialling[rank] = False
        self._submit(self._look, rank, time.monotonic() + PATIENCE)

    def look_now(self, rank: int, timeout: float) -> None:
        """Look on this thread. Only what is certain counts: the time may be too short for more."""
        try:
            self._dial(rank, timeout)
        except Exception as error:
            if is_certain(error):
                self._died(rank)

    def _look(self, rank: int, deadline: float) -> None:
        dead = again = False
        try:
            self._dial(rank)
        except UsageError:
            pass  # this worker is shutting down
        except Unresponsive:
            again = True
            deadline = time.monotonic() + PATIENCE
        except Exception as error:
            if not isinstance(error, ConnectionLostError | RpcTimeoutError):
                _log.info("can't look after worker %d: %r", rank, error)
            dead = is_certain(error) or time.monotonic() >= deadline
            again = not dead
        with self._lock:
            again = self._dialling.pop(rank, False) or again
            if self._closed:
                return
            when = time.monotonic() + _PAUSE
            if again and not dead:
                self._suspects[rank] = deadline, when
        if dead:
            self._died(rank)
        elif again:
            self._set_alarm(when)

    def expire(self, now: float) -> float:
        with self._lock:
            ready = [(rank, deadline) for rank, (deadline, when) in self._suspects.items() if when <= now]
            for rank, _ in ready:
                del self._suspects[rank]
                self._dialling[rank] = False
            following = min((when for _, when in self._suspects.values()), default=0.0)
        for rank, deadline in ready:
            self._submit(self._look, rank, deadline)
        return following

    def close(self) -> None:
        with self._lock:
            self._closed = True


def is_certain(error: BaseException | None) -> bool:
    """Whether a failed dial says that nobody is there, or not the one we look for, and not only that the way is cut."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | SomebodyElse | AuthenticationError | ProtocolError):
            return True
        error = error.__cause__
    return False
