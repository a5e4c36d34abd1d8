"""A value that an owner keeps for others, from before it is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from farprop._torch import ScriptFunction
from farprop.errors import renewed
from farprop.runtime.loop import loop_of_this_thread

# One for all cells, which are many: it is never held for longer than a few lines.
_lock = threading.Lock()


class Cell:
    """Filled once, with a value or an exception. ``site`` and ``maker`` say where it comes from, as far as it is known,
    for those who look: bytes, because nobody does in most cases.
    """

    __slots__ = (
        "_callbacks",
        "_traceback",
        "broken_off",
        "created",
        "done",
        "error",
        "maker",
        "site",
        "value",
    )

    def __init__(self, maker: bytes = b"", site: bytes = b"") -> None:
        self.maker = maker
        self.site = site
        self.created = time.time()
        self.done = False
        self.broken_off = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._callbacks: list[Callable[[], None]] = []

    def fill(self, value: Any) -> None:
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        self._finish(None, error)

    def break_off(self, error: BaseException) -> None:
        """As ``fail``, also if a value has come meanwhile: for its caller, the call that should make it is over."""
        value = None
        with _lock:
            self.broken_off = True
            done = self.done
            if done:
                # Kept until the lock is free: its finaliser is the user's.
                value, self.value = self.value, None
                self.error, self._traceback = error, None
        del value
        if not done:
            self._finish(None, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with _lock:
            if self.done:
                return
            self.value, self.error, self.done = value, error, True
            self._traceback = None if error is None else error.__traceback__
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def replace(self, old: Any, new: Any) -> None:
        """Put another value in the place of one, unless somebody else was faster."""
        with _lock:
            if self.value is old:
                self.value = new

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call it once the cell is filled: now, or on the thread that fills it."""
        with _lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout: float) -> bool:
        """Wait until it is filled; False if ``timeout`` seconds (0: no limit) were not enough."""
        if self.done:
            return True
        bell = threading.Lock()
        bell.acquire()
        self.when_done(bell.release)
        loop = loop_of_this_thread()
        if loop is None:
            return bell.acquire(timeout=timeout or -1)
        with loop.blocked():
            return bell.acquire(timeout=timeout or -1)

    def get(self) -> Any:
        """The value; raises the exception. Only when it is done."""
        value = self.value  # before the look at the error: it may be broken off meanwhile
        if self.error is not None:
            raise renewed(self.error).with_traceback(self._traceback)  # else it would grow with every raise
        return value


class Later:
    """What a function of farprop's returns on the callee when it has to wait first.

    ``subscribe(callback)`` calls back when the wait is over; then ``resume()`` gives the result.
    """

    __slots__ = ("resume", "subscribe")

    def __init__(self, subscribe: Callable[[Callable[..., None]], None], resume: Callable[[], Any]) -> None:
        self.subscribe = subscribe
        self.resume = resume


def not_a_future(function: Any, value: Any) -> RuntimeError:
    """What is wrong with a function decorated with ``async_execution`` that returned this, in torch's words."""
    if isinstance(function._wrapped_async_rpc_function, ScriptFunction):
        return RuntimeError(
            f"Async functions must return an IValue of Future type, but got {type(value).__name__}. Return a Future, "
            "or drop the decorator."
        )
    return RuntimeError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
        f"this one returned {type(value).__name__}. Return a Future, or drop the decorator."
    )
