"""Retries of calls, where the program asks for them.

Rules that hold here:

- Without ``retry`` a call is sent once, and its function runs at most once.
- With ``retry``, a call whose function certainly has not run is tried again. If it may have run, the call is tried
  again only if the function is marked as idempotent.
- The timeout of the call holds for all attempts and pauses together.
"""

from __future__ import annotations

import contextvars
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from farprop._torch import set_result
from farprop.errors import (
    CallCancelledError,
    ConnectionLostError,
    FarpropError,
    InjectedFaultError,
    OverloadedError,
    ReferenceLostError,
    RpcTimeoutError,
    UsageError,
)
from farprop.runtime.agent import Agent
from farprop.runtime.future_call import cancelled_error
from farprop.runtime.futures import Future
from farprop.runtime.sync import Waker
from farprop.wire.function_names import shown_name

_log = logging.getLogger(__name__)

_F = TypeVar("_F", bound=Callable[..., Any])

_LONGEST_PAUSE = 30.0
_MARK = "_farprop_idempotent"
# What may be over at the next attempt. Others, such as UsageError, would come again.
_PASSING = (ConnectionLostError, RpcTimeoutError, OverloadedError, InjectedFaultError)


@dataclass(frozen=True)
class Retry:
    """How often a call is tried, and how long to pause in between.

    Args:
        attempts: The most attempts, the first one included.
        backoff: The seconds before the second attempt. Each further pause is twice as long, up to 30 s. Up to half of
            each pause is left out at random, so that many callers don't come back at the same moment.

    Raises:
        ValueError: ``attempts`` is less than 1, or ``backoff`` is negative.

    Example:
        ``rpc.rpc_sync("worker1", load, args=(name,), retry=rpc.Retry(3))``
    """

    attempts: int
    backoff: float = 0.1

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"A call is attempted at least once, not {self.attempts} times.")
        if not self.backoff >= 0:
            raise ValueError(f"A pause is 0 or more seconds, not {self.backoff}.")

    def pause(self, attempts: int) -> float:
        """How long to pause after so many attempts.

        Args:
            attempts: How often the call was tried.

        Returns:
            The seconds.
        """
        longest = min(self.backoff * 2.0 ** min(attempts - 1, 64), _LONGEST_PAUSE)
        return random.uniform(longest / 2, longest)


def idempotent(func: _F) -> _F:
    """Mark a function as idempotent: to run it twice has the same effect as to run it once.

    Calls of it with ``retry`` are tried again also if it may have run. The mark counts where the call is made.

    Args:
        func: The function.

    Returns:
        The function itself.

    Raises:
        UsageError: The function can't be marked, because it is not written in Python.

    Example:
        ``@rpc.idempotent`` above ``def load(name): ...``
    """
    try:
        setattr(func, _MARK, True)
    except (AttributeError, TypeError) as error:
        raise UsageError(f"{func!r} can't be marked as idempotent. Call a Python function that calls it.") from error
    return func


def _may_retry(func: Any, error: BaseException) -> bool:
    if not isinstance(error, _PASSING) or isinstance(error, ReferenceLostError):
        return False
    return not error.may_have_run or getattr(func, _MARK, False)


class RetriedCall:
    """A call that is tried several times.

    Args:
        agent: This worker.
        retry: How often, and when.
        func: The called function.
        seconds: The time for all attempts together; None for no limit.
        call: Makes one attempt, with the seconds that are left (0: no limit), and returns the result.
    """

    def __init__(
        self, agent: Agent, retry: Retry, func: Any, seconds: float | None, call: Callable[[float], Any]
    ) -> None:
        self._agent = agent
        self._retry = retry
        self._func = func
        self._call = call
        self._sleep: Callable[[float], object] = time.sleep
        self._deadline = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The timeout of the next attempt; 0 for none."""
        return 0.0 if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    def run(self) -> Any:
        """Make all attempts on this thread.

        Returns:
            The result of the first that succeeds.
        """
        try:
            return self._call(self.left)
        except FarpropError as error:
            return self._go_on(error)

    def future_of(self, start: Callable[[float], Future]) -> Future:
        """Make the first attempt on this thread and, if it fails, further ones on a thread of the pool.

        Args:
            start: Starts an attempt, with the seconds that are left (0: no limit).

        Returns:
            A future of the call.
        """
        attempts = _CancellableAttempts(start, start(self.left))
        self._call, self._sleep = attempts.make, attempts.pause
        here = contextvars.copy_context()  # with the current autograd context

        def go_on(error: FarpropError) -> None:
            try:
                value = here.run(self._go_on, error)
            except Exception as last:
                attempts.end(None, last)
            else:
                attempts.end(value, None)

        def on_done(done: Any) -> None:
            try:
                value = done.wait()
            except FarpropError as error:
                self._agent.services.submit(go_on, error)  # this may be the thread that called ``rpc_async``
            except Exception as error:
                attempts.end(None, error)
            else:
                attempts.end(value, None)

        attempts.current.add_done_callback(on_done)
        return attempts.outcome

    def _go_on(self, error: FarpropError) -> Any:
        """Try again after the first attempt has failed; raises the last error."""
        attempts = 1
        while True:
            pause = self._retry.pause(attempts)
            too_late = self._deadline is not None and time.monotonic() + pause >= self._deadline
            if attempts >= self._retry.attempts or too_late or not _may_retry(self._func, error):
                if attempts > 1:
                    error.add_note(f"The call was tried {attempts} times.")
                try:
                    raise error
                finally:
                    del error  # its traceback refers to this frame
            _log.info("attempt %d of a call failed, the next is in %.3f s: %s", attempts, pause, error)
            with self._agent.blocked():
                self._sleep(pause)
            attempts += 1
            try:
                return self._call(self.left)
            except FarpropError as failed:
                error = failed


class _CancellableAttempts:
    """The attempts of an asynchronous call, one after the other. It is what the future of the call waits for.

    Args:
        start: Starts an attempt.
        first: The first one, which was started.
    """

    def __init__(self, start: Callable[[float], Future], first: Future) -> None:
        self.outcome = Future()
        self.current = first
        self.outcome.call = self
        self._start = start
        self._is_cancelled = False
        self._woken = Waker()
        self._open = [True]  # empty once the outcome is there: to delete is atomic

    def make(self, left: float) -> Any:
        """Make an attempt, and wait for it."""
        self.current = self._start(left)
        if self._is_cancelled:
            self.current.cancel()
        return self.current.wait()

    def pause(self, seconds: float) -> None:
        """Pause between two attempts. Raises if there is to be no other."""
        self._woken.wait(timeout=seconds)
        if self._is_cancelled:
            raise self._error()

    def end(self, value: Any, error: Exception | None) -> None:
        """The last attempt has ended."""
        try:
            del self._open[0]
        except IndexError:
            return  # it was cancelled
        if error is None:
            set_result(self.outcome, value)
        elif self._is_cancelled and isinstance(error, CallCancelledError):
            self.outcome.set_cancelled(error)
        else:
            self.outcome.set_exception(error)
        self.outcome.on_call_ended()

    def read(self, until: float | None = None) -> None:
        """Nothing is read here: a thread of the pool makes the attempts."""

    def cancel(self) -> bool:
        """End the call, also between two attempts."""
        self._is_cancelled = True
        if not self.current.done() and not self.current.cancel():
            return False  # its answer is here
        self._woken.wake()
        self.end(None, self._error())
        return self.outcome.cancelled()

    def _error(self) -> CallCancelledError:
        called = self.current.called
        worker, origin = ("a worker", (b"a function",)) if called is None else called
        return cancelled_error(worker, shown_name(origin[0]).removeprefix(":"))
