"""Finding out whether a worker that something is wrong with is alive.

It is dialled. If it answers, it lives. If its address refuses us, or belongs to somebody else, it is dead. If it can't
be reached at all, it is dialled again for a while, and then it is taken for dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from farprop.errors import AuthenticationError, ConnectionLostError, FarpropError
from farprop.runtime.dialling import SomebodyElse

PATIENCE = 20.0
_PAUSE = 0.5


class Survival:
    """``dial(rank)`` raises if it can't; ``died(rank)`` is called once for a worker that is dead."""

    def __init__(
        self,
        dial: Callable[[int], object],
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
        self._dialling: set[int] = set()
        self._closed = False

    def suspect(self, rank: int) -> None:
        with self._lock:
            if self._closed or rank in self._dialling or rank in self._suspects:
                return
            self._dialling.add(rank)
        self._submit(self._look, rank, time.monotonic() + PATIENCE)

    def look_now(self, rank: int) -> None:
        """Look on this thread, which may take as long as dialling may."""
        self._look(rank, time.monotonic() + PATIENCE)

    def _look(self, rank: int, deadline: float) -> None:
        dead = again = False
        try:
            self._dial(rank)
        except AuthenticationError:
            dead = True  # it refuses us, or somebody else sits there
        except ConnectionLostError as error:
            dead = is_certain(error) or time.monotonic() >= deadline
            again = not dead
        except FarpropError:
            pass  # this worker is shutting down
        with self._lock:
            self._dialling.discard(rank)
            if self._closed:
                return
            if again:
                when = time.monotonic() + _PAUSE
                self._suspects[rank] = deadline, when
        if again:
            self._set_alarm(when)
        if dead:
            self._died(rank)

    def expire(self, now: float) -> float:
        with self._lock:
            ready = [(rank, deadline) for rank, (deadline, when) in self._suspects.items() if when <= now]
            for rank, _ in ready:
                del self._suspects[rank]
                self._dialling.add(rank)
            following = min((when for _, when in self._suspects.values()), default=0.0)
        for rank, deadline in ready:
            self._submit(self._look, rank, deadline)
        return following

    def close(self) -> None:
        with self._lock:
            self._closed = True


def is_certain(error: BaseException | None) -> bool:
    """Whether a failed dial says that nobody is there, and not only that the way is cut."""
    while error is not None:
        if isinstance(error, ConnectionRefusedError | SomebodyElse):
            return True
        error = error.__cause__
    return False
