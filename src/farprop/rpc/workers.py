"""Who is in the job, and who joins, leaves and dies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from farprop.errors import RpcTimeoutError
from farprop.ids import WorkerInfo
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.options import checked_timeout
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.thread_pool import check_may_block
from farprop.runtime.watch import CallbackHandle

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05


def workers() -> list[WorkerInfo]:
    """List the workers of the job. In a group without ``world_size`` this asks the store.

    A worker that was killed is listed until this worker knows that it is dead, or another process takes its name or
    its rank.

    Returns:
        The names and ranks of all workers, by rank. This worker is one of them.

    Raises:
        UsageError: This process is not a worker.

    Example:
        ``[info.name for info in rpc.workers()]``
    """
    return current_agent().living_workers()


def wait_for_workers(wanted: int | Iterable[str], timeout: float = UNSET_RPC_TIMEOUT) -> list[WorkerInfo]:
    """Wait until workers have joined a group without ``world_size``.

    Args:
        wanted: How many workers there have to be, with this one; or the names of those that have to be there.
        timeout: The seconds to wait; 0 disables the timeout. By default the process's default.

    Returns:
        All workers of the job, as :func:`workers` lists them.

    Raises:
        RpcTimeoutError: They did not join in time. The text says who is missing.
        UsageError: This process is not a worker.

    Example:
        ``rpc.wait_for_workers(["trainer", "server"], timeout=30)``
    """
    agent = current_agent()
    if not isinstance(wanted, int):
        wanted = {wanted} if isinstance(wanted, str) else set(wanted)
    seconds = agent.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
    deadline = None if seconds is None else time.monotonic() + seconds
    pause = _FIRST_PAUSE
    with agent.blocked():
        while True:
            present = agent.living_workers()
            missing = _missing(present, wanted)
            if not missing:
                return present
            check_may_block("wait_for_workers")
            if deadline is not None and time.monotonic() >= deadline:
                raise RpcTimeoutError(f"{missing} within {seconds:g} s. Pass a larger timeout, or 0 to disable it.")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _missing(present: list[WorkerInfo], wanted: int | set[str]) -> str:
    """Who is missing, for the error; empty if nobody is."""
    if isinstance(wanted, int):
        return "" if len(present) >= wanted else f"{len(present)} of {wanted} workers have joined"
    absent = wanted - {info.name for info in present}
    return f"{', '.join(sorted(absent))} did not join" if absent else ""


def on_join(callback: Callable[[WorkerInfo], Any]) -> CallbackHandle:
    """Have a function called for each worker that joins the group from now on, until :func:`shutdown`.

    To miss nobody, call :func:`workers` after it. In a group with ``world_size`` nobody joins later.

    Args:
        callback: Called with the worker's name and rank, once for each worker, about a second after it has joined. It
            runs on a thread of farprop's, and may make calls. Callbacks run one after the other, so a slow one delays
            the next. What it raises is logged.

    Returns:
        A handle; its ``remove()`` ends the calls.

    Raises:
        UsageError: This process is not a worker.

    Example:
        ``handle = rpc.on_join(lambda info: print(info.name, "is there"))``
    """
    return current_agent().watch.on_join(callback)


def on_leave(callback: Callable[[WorkerInfo], Any]) -> CallbackHandle:
    """Have a function called for each worker that leaves or dies from now on, until :func:`shutdown`.

    This worker keeps a connection to each of the others, to notice. In a group with ``world_size`` all leave together,
    so it is called for deaths only.

    Args:
        callback: Called with the worker's name and rank, once for each worker, as for :func:`on_join`.

    Returns:
        A handle; its ``remove()`` ends the calls.

    Raises:
        UsageError: This process is not a worker.

    Example:
        ``handle = rpc.on_leave(lambda info: print(info.name, "is gone"))``
    """
    return current_agent().watch.on_leave(callback)


def on_failure(worker: str | int | WorkerInfo, callback: Callable[[WorkerInfo, str], Any]) -> CallbackHandle:
    """Have a function called when a worker dies, until :func:`shutdown`.

    A worker that leaves with a graceful :func:`shutdown` has not died; one that ends in any other way has. A process
    that takes the name of a dead worker is another worker, and needs a callback of its own.

    Args:
        worker: The worker's name, rank or ``WorkerInfo``.
        callback: Called once, with the worker's name and rank and the reason, as text. If the worker is dead already,
            it is called soon. It runs as those of :func:`on_join` do.

    Returns:
        A handle; its ``remove()`` keeps it from being called.

    Raises:
        UsageError: This process is not a worker, there is no such worker, or it is this one.

    Example:
        ``handle = rpc.on_failure("worker1", lambda info, reason: print(info.name, "died:", reason))``
    """
    return current_agent().watch.on_failure(worker.name if isinstance(worker, WorkerInfo) else worker, callback)
