"""Calls groups and works of any class the way torch's own C++ code calls them.

A group may derive from ``torch.distributed.ProcessGroup`` and override any of its methods, and its works may be of any
class. Programs that run with torch's DistributedDataParallel rely on what its C++ code does: it always passes a timeout
to ``wait``; it asks ``getRank`` and ``getSize``, and does not see a ``size`` that is only there in Python.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from farprop._torch import without_overrides
from farprop.errors import CollectiveError, CollectiveTimeoutError, renewed, without_frames
from farprop.runtime.sync import DoneSignal

NO_TIMEOUT = timedelta(0)


def rank_of(group: dist.ProcessGroup) -> int:
    """The rank of this process as C++ sees it."""
    return dist.ProcessGroup.rank(group)


def size_of(group: dist.ProcessGroup) -> int:
    """The number of ranks as C++ sees it. Groups that average by themselves may tell C++ that it is 1."""
    return dist.ProcessGroup.size(group)


def implementer(group: dist.ProcessGroup, collective: str) -> dist.ProcessGroup:
    """The object to call a collective on: the group, or a plain one with its backends if it does not override it.

    If Python calls such a group itself, torch holds the interpreter's lock until the backend has taken the call. A
    thread of Gloo's that releases earlier tensors waits for that lock while it holds the lock of the backend's queue:
    a deadlock. Torch's own C++ code can't run into it, because its tensors have no Python objects.
    """
    kind = type(group)
    is_overridden = getattr(kind, collective) is not getattr(dist.ProcessGroup, collective)
    if kind is dist.ProcessGroup or is_overridden or collective in getattr(group, "__dict__", ()):
        return group
    return without_overrides(group)  # type: ignore[no-any-return]


def wait_for(work: Any) -> None:
    """Wait for a work without a limit. Torch ignores what ``wait`` returns."""
    work.wait(NO_TIMEOUT)


def wait_within(work: Any, timeout: timedelta) -> bool:
    """Wait for a work up to ``timeout``, also for a work that torch made of a future, which can't do that itself.

    Returns:
        What the work's own ``wait`` returns; False if the time is over.
    """
    try:
        return bool(work.wait(timeout))
    except RuntimeError as error:
        if "finite timeout not implemented" not in str(error):
            raise
    return is_done_within(work.get_future(), timeout) and bool(work.wait(NO_TIMEOUT))


def is_done_within(future: Future[Any], timeout: timedelta) -> bool:
    """Wait for a future up to ``timeout``; True also if it ends with an error."""
    if future.done():
        return True
    ended = DoneSignal()
    future.add_done_callback(ended.on_done)
    return ended.wait(timeout=min(timeout.total_seconds(), threading.TIMEOUT_MAX)) or future.done()


def result_of(future: Future[Any]) -> Any:
    """Wait for a future. Its error is raised as a copy.

    The future keeps the error, the error keeps the frames that it was raised through, and one of them keeps the future.
    The garbage collector does not see through torch's future, so all that is in those frames would never be freed.
    """
    try:
        return future.wait()
    except Exception as error:
        raise renewed(without_frames(error)) from error.__cause__


def tensor_of(value: Any) -> torch.Tensor:
    """The reduced tensor in the value of a future. A hook's future has the tensor itself, a work's future a list of it.

    Raises:
        CollectiveError: the value is something else.
        Exception: the value is this exception. ``Future.set_exception`` stores it there. The future's own ``wait``
            raises it, but that of a work that torch made of the future does not.
    """
    if isinstance(value, Exception):
        raise renewed(without_frames(value))
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
        return value[0]
    raise CollectiveError(
        f"The future of an all-reduce has to have the reduced tensor, or a list of it, but it has {_shown(value)}. "
        "Look at get_future() of the group's works, or at the communication hook."
    )


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def timed_out(seconds: float) -> CollectiveTimeoutError:
    """The error of a wait that took too long."""
    return CollectiveTimeoutError(
        f"A collective was not done after {seconds:g} s. A rank has not called it, or is slow or gone."
    )
