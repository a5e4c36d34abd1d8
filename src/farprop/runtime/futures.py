"""The future that ``rpc_async`` returns: torch's, with a ``wait`` that frees its pool thread and reacts to Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from farprop._torch import set_unwrap_function, wait
from farprop.errors import renewed, without_frames
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.sync import OneShot
from farprop.runtime.thread_pool import pool_of_this_thread


class Future(torch.futures.Future[Any]):
    """A ``torch.futures.Future``.

    Waiting for it inside a called function does not use up a pool thread. Ctrl-C interrupts a wait in the main thread.
    """

    @uncompiled
    def wait(self) -> Any:
        return wait_on_pool(self)

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """Like torch's, but the callback runs in the current autograd context of this thread."""
        context = current_context.get()
        return super().then(callback if context is None else partial(_run_in, context, callback))

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


def wait_on_pool(future: torch.futures.Future[Any]) -> Any:
    """Wait for any of torch's futures like ``Future.wait``."""
    if not future.done():
        pool = pool_of_this_thread()
        if pool is not None:
            with pool.blocked():
                return wait(future)
        if threading.get_ident() == threading.main_thread().ident:
            # Torch's own wait does not handle signals; waiting for a lock does.
            done = OneShot()
            future.add_done_callback(lambda _: done.set())
            done.wait()
    return wait(future)


def _run_in(context: Context, callback: Callable[[Any], Any], future: Any) -> Any:
    outer = current_context.set(context)
    try:
        return callback(future)
    finally:
        current_context.reset(outer)


def _raise_renewed(error: Exception) -> None:
    raise renewed(error)
