"""Replacements for two functions of torch that only know torch's own futures and groups."""

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farprop._torch import Future
from farprop.locks import make_lock
from farprop.runtime.agent_registry import current_agent, is_agent_set

__all__ = ["monitored_barrier", "wait_all"]

_LOOK_SECONDS = 0.5  # how often ``wait_all`` looks whether all futures are done
_monitored_barrier = dist.monitored_barrier


def _outside_thread_limit() -> contextlib.AbstractContextManager[None]:
    """While a called function waits, its thread does not count against the pool's limit."""
    return current_agent().blocked() if is_agent_set() else contextlib.nullcontext()


def wait_all(futures: Sequence["torch.futures.Future[Any]"]) -> list[Any]:
    """Wait for all futures, or until the first one fails: ``torch.futures.wait_all``.

    Torch's own looks for errors only where its C++ code stores them. An error set with ``Future.set_exception``, as
    farprop does, is a value to that code, so it would wait for the slowest future before it raised.

    Args:
        futures: The futures.

    Returns:
        Their values, in order.

    Raises:
        TypeError: An element is not a future.
        Exception: The error of the future that failed first.
    """
    for future in futures:
        if not isinstance(future, Future):
            raise TypeError(f"wait_all() takes a list of futures, got {type(future).__name__} in it")
    pending = len(futures)
    if not pending:
        return []
    lock = make_lock("wait_all")
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
    with _outside_thread_limit():
        # The event alone is not enough: torch swallows an interrupt in a callback that it runs at once.
        while not settled.wait(_LOOK_SECONDS) and not all(future.done() for future in futures):
            pass
    if errors:
        # Clearing the list breaks the cycle error -> traceback -> frame -> list.
        error, errors[:] = errors[0], []
        try:
            raise error
        finally:
            del error
    return [future.wait() for future in futures]


def monitored_barrier(
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier that names the ranks that did not reach it in time: ``torch.distributed.monitored_barrier``.

    Torch's own accepts only Gloo groups. A group that is written in Python has a ``monitored_barrier`` of its own.

    Args:
        group: The group. By default the default group.
        timeout: How long to wait, in seconds if it is a number. By default the group's timeout.
        wait_all_ranks: Whether to wait for all ranks and name all that are missing, not only the first.
    """
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, dist.ProcessGroup) or type(found) is dist.ProcessGroup:
        _monitored_barrier(group, timeout, wait_all_ranks)
        return
    limit = timedelta(seconds=timeout) if isinstance(timeout, float) else timeout
    found.monitored_barrier(limit, wait_all_ranks)  # type: ignore[attr-defined]
