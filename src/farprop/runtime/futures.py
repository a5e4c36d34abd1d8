"""The future that ``rpc_async`` returns: torch's, with a ``wait`` that frees its pool thread and reacts to Ctrl-C."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from farprop._torch import set_unwrap_function, wait
from farprop.errors import renewed, without_frames
from farprop.protocol.waits import seconds_text
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.recorder import A_FUTURE, recorder
from farprop.runtime.sync import DoneSignal, awaited_by
from farprop.runtime.thread_pool import pool_of_this_thread
from farprop.wire.function_names import shown_name

_LOOK_SECONDS = 0.5  # a thread that waits looks this often whether the future is done


class PendingCall(Protocol):
    """A call that a future waits for."""

    def read(self) -> None:
        """Read answers on this thread until the call has ended, if this thread may; else return at once."""


class Future(torch.futures.Future[Any]):
    """A ``torch.futures.Future``.

    Waiting for it inside a called function does not use up a pool thread. Ctrl-C interrupts a wait in the main thread.

    The thread that waits for a call reads the answer itself, and completes the future. If callbacks were added before,
    a thread of the pool does: callbacks are code of the program, and may wait for what the waiting thread does next.
    """

    call: PendingCall | None = None
    """The call whose outcome completes this future, while it is open."""
    called: tuple[str, Sequence[Any]] | None = None
    """The worker that was called and the call's origin (``future_call.Origin``), for ``repr``."""
    _has_callbacks = False
    _kept: object = None

    def __repr__(self) -> str:
        state = "done" if self.done() else "pending"
        if self.called is None:
            return f"<Future: {state}>"
        worker, (name, _, _, began, *_) = self.called
        function = shown_name(name).removeprefix(":")
        return f"<Future of {function} on {worker}: {state}, {seconds_text(time.monotonic() - began)} old>"

    @uncompiled
    def wait(self) -> Any:
        began = recorder.begin_wait(A_FUTURE) if recorder.is_on and not self.done() else 0.0
        try:
            call = self.call
            if call is not None and not self._has_callbacks:
                call.read()
            return wait_on_pool(self)
        finally:
            if began:
                recorder.end_wait(A_FUTURE, began)

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """Like torch's, but the callback runs in the current autograd context of this thread."""
        self._has_callbacks = True
        context = current_context.get()
        return super().then(callback if context is None else partial(_run_in, context, callback))

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self._has_callbacks = True
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
            super().set_exception(without_frames(result))
            return
        set_unwrap_function(self, _raise_renewed)
        self.set_result(without_frames(result))


def keep_until_done(future: torch.futures.Future[Any], kept: object) -> None:
    """Keep an object alive until the call of a future has ended, whatever becomes of the future."""
    if isinstance(future, Future) and future.call is not None:
        future._kept = kept


def wait_on_pool(future: torch.futures.Future[Any]) -> Any:
    """Wait for any of torch's futures like ``Future.wait``."""
    if not future.done():
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


def _run_in(context: Context, callback: Callable[[Any], Any], future: Any) -> Any:
    outer = current_context.set(context)
    try:
        return callback(future)
    finally:
        current_context.reset(outer)


def _raise_renewed(error: Exception) -> None:
    raise renewed(error)
