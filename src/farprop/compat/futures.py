"""``torch.futures.wait_all`` for futures whose errors are Python exceptions."""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import torch

from farprop._torch import Future
from farprop.runtime import current

__all__ = ["wait_all"]


def _place_given_up() -> contextlib.AbstractContextManager[None]:
    """Inside a called function, waiting here must not use up a worker thread."""
    return current.current_agent().blocked() if current.is_agent_set() else contextlib.nullcontext()


def wait_all(futures: Sequence["torch.futures.Future[Any]"]) -> list[Any]:
    """Wait for all futures and return their values in order, or raise the first error and wait no longer.

    torch's own looks for errors where its C++ code puts them. An error set with ``Future.set_exception``, as
    farprop sets them, is a value to that code: it would wait for the slowest future before it raised.
    """
    for future in futures:
        if not isinstance(future, Future):
            raise TypeError(f"wait_all() takes a list of futures, got {type(future).__name__} in it")
    pending = len(futures)
    if not pending:
        return []
    lock = threading.Lock()
    settled = threading.Event()
    errors: list[BaseException] = []

    def on_done(future: "torch.futures.Future[Any]") -> None:
        nonlocal pending
        try:
            future.value()
        except BaseException as error:
            errors.append(error)
        with lock:
            pending -= 1
            if errors or not pending:
                settled.set()

    for future in futures:
        future.add_done_callback(on_done)
        if errors:
            break
    with _place_given_up():
        settled.wait()
    if errors:
        # Emptying the list breaks the cycle error -> traceback -> frame -> list.
        error, errors[:] = errors[0], []
        try:
            raise error
        finally:
            del error
    return [future.wait() for future in futures]
