"""The future that ``rpc_async`` returns: torch's, but one that waits well."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from farprop._torch import set_unwrap_function, wait
from farprop.errors import renewed, without_frames
from farprop.runtime.gradients.contexts import Context, current_context
from farprop.runtime.loop import loop_of_this_thread
from farprop.runtime.uncompiled import uncompiled


class Future(torch.futures.Future[Any]):
    """A ``torch.futures.Future``.

    Waiting for it inside a called function does not use up a worker thread, and waiting in the main thread can be
    ended with Ctrl-C.
    """

    @uncompiled
    def wait(self) -> Any:
        return wait_well(self)

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future[Any]:
        """As torch's; the callback runs in the autograd context that this thread has now."""
        context = current_context.get()
        return super().then(callback if context is None else partial(_run_in, context, callback))

    def set_exception(self, result: Any) -> None:
        """As torch's, but every ``wait`` raises a copy. Torch keeps the exception where the garbage collector does not
        see it: with it would stay the frames that it was raised through, which have this future, for ever.
        """
        assert isinstance(result, Exception), f"{result!r} is not an exception"
        if set_unwrap_function is None:
            super().set_exception(without_frames(result))
            return
        set_unwrap_function(self, _raise_renewed)
        self.set_result(without_frames(result))


def wait_well(future: torch.futures.Future[Any]) -> Any:
    """Wait for one of torch's futures as for one of ours."""
    if not future.done():
        loop = loop_of_this_thread()
        if loop is not None:
            with loop.blocked():
                return wait(future)
        if threading.get_ident() == threading.main_thread().ident:
            # Torch's own wait does not look for signals until it is over; a lock does.
            bell = threading.Lock()
            bell.acquire()
            future.add_done_callback(lambda _: bell.release())
            bell.acquire()
    return wait(future)


def _run_in(context: Context, callback: Callable[[Any], Any], future: Any) -> Any:
    outer = current_context.set(context)
    try:
        return callback(future)
    finally:
        current_context.reset(outer)


def _raise_renewed(error: Exception) -> None:
    raise renewed(error)
