"""Waiting for another thread.

``threading.Event`` is built from a condition in Python: it takes several calls and two locks to wait for one. The
classes here are a bare lock that is held while there is nothing to wait for: to wait is to acquire it, to wake is to
release it. Their methods that are used in calls are the lock's own, so they cost no Python call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

# By thread, the future or the slot of a value that it waits for; for inspection. Whoever waits removes it with ``pop``
# at the very beginning of a ``finally``: no interrupt comes before that.
awaited_by: dict[int, Any] = {}


class Wait(Protocol):
    """How one waits: True once woken, False if ``timeout`` seconds were not enough (-1: no limit)."""

    def __call__(self, *, timeout: float = -1) -> bool: ...


class OneShot:
    """An event that happens once, and that one thread waits for.

    ``set()`` may be called once, before or after ``wait(timeout=...)``; a second one raises ``RuntimeError``.
    """

    __slots__ = ("set", "wait")

    set: Callable[[], None]
    wait: Wait

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.set = lock.release
        self.wait = lock.acquire


class DoneSignal:
    """As ``OneShot``, for futures of torch's: ``on_done`` is a callback for them.

    It is C code, and ignores its argument. If the future is done already, torch runs a callback at once, and swallows
    an interrupt in it: one in Python code would lose the wake-up.
    """

    __slots__ = ("on_done", "wait")

    on_done: Callable[[object], None]
    wait: Wait

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self.on_done = lock.__exit__  # type: ignore[assignment]
        self.wait = lock.acquire


class Waker:
    """Wakes one thread, any number of times.

    ``wait(timeout=...)`` returns once ``wake`` was called since the last ``wait``. Calls of ``wake`` that nobody has
    waited for yet count as one.
    """

    __slots__ = ("_release", "wait")

    wait: Wait

    def __init__(self) -> None:
        lock = threading.Lock()
        lock.acquire()
        self._release = lock.release
        self.wait = lock.acquire

    def wake(self) -> None:
        try:
            self._release()
        except RuntimeError:
            pass  # woken already
