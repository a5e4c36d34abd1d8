"""The future that ``rpc_async`` returns: torch's, with a ``wait`` that frees its pool thread and reacts to Ctrl-C, and
with what asyncio and ``concurrent.futures`` have beside it: ``await`` and ``cancel``.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from farprop._torch import set_unwrap_function, wait
from farprop.errors import CallCancelledError, renewed, without_frames
from farprop.protocol.waits import seconds_text
from farprop.runtime import checkpoint_regions
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.checkpoint_regions import Outcome, region_here, run_outside
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.loop_inbox import running_inbox
from farprop.runtime.recorder import A_FUTURE, recorder
from farprop.runtime.sync import DoneSignal, awaited_by
from farprop.runtime.thread_pool import check_may_block, pool_of_this_thread
from farprop.wire.function_names import shown_name

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    _T = TypeVar("_T", default=Any)  # Python 3.13 has the default
else:
    from typing import TypeVar

    _T = TypeVar("_T")

_LOOK_SECONDS = 0.5  # a thread that waits looks this often whether the future is done


class PendingCall(Protocol):
    """A call that a future waits for."""

    def read(self, until: float | None = None) -> None:
        """Read answers on this thread until the call has ended, or ``until`` then, if this thread may; else return at
        once.
        """

    def cancel(self) -> bool:
        """End the call with ``CallCancelledError``, and tell the callee; returns False if it has ended before."""


class Future(torch.futures.Future[_T]):
    """A ``torch.futures.Future`` that can be awaited and cancelled.

    Waiting for it inside a called function does not use up a pool thread. Ctrl-C interrupts a wait in the main thread.

    The thread that waits for a call reads the answer itself, and completes the future. If callbacks were added before,
    a thread of the pool does: callbacks are code of the program, and may wait for what the waiting thread does next.

    Any number of asyncio tasks, in any loops, may await it. No thread waits for them.
    """

    call: PendingCall | None = None
    """The call whose outcome completes this future, while it is open."""
    called: tuple[str, Sequence[Any]] | None = None
    """The worker that was called and the call's origin (``future_call.Origin``), for ``repr``."""
    _has_callbacks = False
    _is_cancelled = False
    _kept: object = None
    _awaited_by: dict[asyncio.Future[None], None] | None = None

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        if self.called is None:
            return f"<Future: {state}>"
        worker, (name, _, _, began, *_) = self.called
        function = shown_name(name).removeprefix(":")
        return f"<Future of {function} on {worker}: {state}, {seconds_text(time.monotonic() - began)} old>"

    @uncompiled
    def wait(self) -> _T:
        if not self.done():
            check_may_block("Future.wait")
        began = recorder.begin_wait(A_FUTURE) if recorder.is_on and not self.done() else 0.0
        try:
            call = self.call
            if call is not None and not self._has_callbacks:
                call.read()
            return wait_on_pool(self)  # type: ignore[no-any-return]
        finally:
            if began:
                recorder.end_wait(A_FUTURE, began)

    def __await__(self) -> Generator[Any, None, _T]:
        if not self.done():
            yield from self._done_in_loop()
        if self._is_cancelled:
            raise asyncio.CancelledError("the call was cancelled")
        return wait(self)  # type: ignore[no-any-return]

    def _done_in_loop(self) -> Generator[Any, None, None]:
        inbox = running_inbox()
        waiter: asyncio.Future[None] = inbox.loop.create_future()
        if self._awaited_by is None:
            self._awaited_by = {}
        awaited_by = self._awaited_by
        awaited_by[waiter] = None
        # Not this class's: the callback is not the program's, so a thread that waits may run it.
        super().add_done_callback(partial(inbox.put, waiter))
        try:
            if not self.done():
                yield from waiter
        except asyncio.CancelledError:
            awaited_by.pop(waiter, None)
            if not awaited_by:
                self.cancel()
            raise
        finally:
            awaited_by.pop(waiter, None)

    def cancel(self) -> bool:
        """Cancel the call, and tell the callee. The future is done at once.

        What has not begun on the callee will never run. An ``async def`` function there gets
        ``asyncio.CancelledError``. A function that runs in a thread goes on, and its result is dropped.

        Returns:
            True if the future is cancelled now. False if it is done, or about to be done, or no call completes it.
        """
        call = self.call
        return call is not None and not self.done() and call.cancel()

    def cancelled(self) -> bool:
        """Whether the call was cancelled.

        Returns:
            Whether ``cancel`` has returned True.
        """
        return self._is_cancelled

    def set_cancelled(self, error: CallCancelledError) -> None:
        """The call was cancelled. ``wait`` raises the error, and ``await`` asyncio's."""
        self._is_cancelled = True
        self.set_exception(error)

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """Like torch's, but the callback runs in the current autograd context of this thread.

        In a checkpointed function it runs once, and its result is kept, as that of a call.
        """
        self._has_callbacks = True
        context = current_context.get()
        if context is not None:
            callback = partial(_run_in, context, callback)
        if not checkpoint_regions.is_used or (region := region_here()) is None:
            return super().then(callback)
        outcome, is_there = region.next_call("a callback of a future")
        made: Future[Any] = Future()
        if is_there:
            outcome.complete(made)
            return made
        outcome.pending = made
        super().then(partial(_complete_once, made, outcome, callback))
        if made.done() and region.keeps_random_state:  # the callback may have drawn some on this thread
            outcome.keep_random_state()
        return made

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        if getattr(callback, "__module__", None) == "asyncio.tasks":
            # That of ``asyncio.wait``. It has to run in the loop's thread; in another one the loop is not woken.
            raise TypeError(
                f"asyncio.wait takes tasks, and not {self}. Make one of each future: asyncio.ensure_future(future). "
                "asyncio.gather, as_completed and wait_for take futures as they are."
            )
        self._has_callbacks = True
        if checkpoint_regions.is_used and region_here() is not None:
            callback = partial(run_outside, callback)
        super().add_done_callback(callback)

    def on_call_ended(self) -> None:
        """Let go of the call, and of what was kept for it."""
        self.call = self._kept = None

    def set_exception(self, result: Any) -> None:
        """Like torch's, but every ``wait`` raises a copy.

        Torch stores the exception where the garbage collector does not see it. A raised exception refers to its frames,
        and they refer to this future: a cycle that would never be freed.
        """
        assert isinstance(result, Exception), f"{result!r} is not an exception"
        if set_unwrap_function is None:
            super().set_exception(without_frames(result))  # type: ignore[arg-type]
            return
        set_unwrap_function(self, _raise_renewed)
        self.set_result(without_frames(result))  # type: ignore[arg-type]


def keep_until_done(future: torch.futures.Future[Any], kept: object) -> None:
    """Keep an object alive until the call of a future has ended, whatever becomes of the future."""
    if isinstance(future, Future) and future.call is not None:
        future._kept = kept


def wait_on_pool(future: torch.futures.Future[Any]) -> Any:
    """Wait for any of torch's futures like ``Future.wait``."""
    if not future.done():
        check_may_block("Waiting for a future")
        me = threading.get_ident()
        awaited_by[me] = future
        try:
            pool = pool_of_this_thread()
            if pool is not None:
                with pool.blocked():
                    return wait(future)
            if me == threading.main_thread().ident:
                # Torch's own wait does not handle signals; waiting for a lock does.
                done = DoneSignal()
                future.add_done_callback(done.on_done)
                while not future.done():
                    done.wait(timeout=_LOOK_SECONDS)
            return wait(future)
        finally:
            awaited_by.pop(me, None)
    return wait(future)


def wait_until(future: Future, deadline: float | None) -> bool:
    """Wait for the future of a call like ``Future.wait``, but no longer than until the deadline.

    Returns:
        Whether it is done.
    """
    call = future.call
    if call is not None and not future.done():
        call.read(deadline)
    if future.done():
        return True
    me = threading.get_ident()
    pool = pool_of_this_thread()
    done = DoneSignal()
    awaited_by[me] = future
    try:
        future.add_done_callback(done.on_done)
        with nullcontext() if pool is None else pool.blocked():
            while not future.done():
                left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, deadline - time.monotonic())
                if left <= 0:
                    return False
                done.wait(timeout=left)
        return True
    finally:
        awaited_by.pop(me, None)


def _run_in(context: Context, callback: Callable[[Any], Any], future: Any) -> Any:
    outer = current_context.set(context)
    try:
        return callback(future)
    finally:
        current_context.reset(outer)


def _complete_once(made: Future[Any], outcome: Outcome, callback: Callable[[Any], Any], future: Any) -> None:
    """Run a callback in the first run of a checkpointed function; others get the same result."""
    try:
        result = outcome.kept_value(run_outside, callback, future)
    except Exception as error:
        made.set_exception(error)
    else:
        made.set_result(result)


def _raise_renewed(error: Exception) -> None:
    raise renewed(error)
