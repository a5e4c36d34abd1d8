"""The slot of a value that this worker owns: empty until the value is made, like a future."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from farprop._torch import ScriptFunction
from farprop.errors import renewed
from farprop.locks import make_lock
from farprop.runtime.sync import OneShot
from farprop.runtime.thread_pool import pool_of_this_thread

# One for all cells, which are many: it is never held for longer than a few lines.
_lock = make_lock("value_slot")


class ValueSlot:
    """Filled once, with a value or an exception.

    Args:
        maker: The name of the function that makes the value, as it travelled; for inspection.
        site: The line of the program that called for it, as it travelled; for inspection.
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
        """The value is made. Ignored if the slot is filled already."""
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        """The value can't be made. Ignored if the slot is filled already."""
        self._finish(None, error)

    def break_off(self, error: BaseException) -> None:
        """As ``fail``, but replaces a value that is there: for its caller, the call that makes it has failed."""
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
        """Replace a value by another one, if it is still there."""
        with _lock:
            if self.value is old:
                self.value = new

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once the slot is filled: now, or on the thread that fills it."""
        with _lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout: float) -> bool:
        """Wait until the slot is filled.

        Args:
            timeout: In seconds; 0 disables it.

        Returns:
            False if the timeout expired first.
        """
        if self.done:
            return True
        filled = OneShot()
        self.when_done(filled.set)
        pool = pool_of_this_thread()
        if pool is None:
            return filled.wait(timeout=timeout or -1)
        with pool.blocked():
            return filled.wait(timeout=timeout or -1)

    def get(self) -> Any:
        """The value; raises the exception if there is one. The slot must be filled."""
        value = self.value  # read before the error: ``break_off`` may come between
        if self.error is not None:
            # Its own traceback: otherwise the traceback would grow with every raise.
            raise renewed(self.error).with_traceback(self._traceback)
        return value


class Deferred:
    """What a handler of farprop's returns when it has to wait before it has its result.

    Args:
        subscribe: Calls its argument back when the wait is over.
        resume: Returns the result, after that.
    """

    __slots__ = ("resume", "subscribe")

    def __init__(self, subscribe: Callable[[Callable[..., None]], None], resume: Callable[[], Any]) -> None:
        self.subscribe = subscribe
        self.resume = resume


def not_a_future(function: Any, value: Any) -> RuntimeError:
    """The error, in torch's words, of a function decorated with ``async_execution`` that did not return a future."""
    if isinstance(function._wrapped_async_rpc_function, ScriptFunction):
        return RuntimeError(
            f"Async functions must return an IValue of Future type, but got {type(value).__name__}. Return a Future, "
            "or drop the decorator."
        )
    return RuntimeError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
        f"this one returned {type(value).__name__}. Return a Future, or drop the decorator."
    )
