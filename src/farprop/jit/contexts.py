"""The autograd context of compiled code that torch has moved to a thread of its own.

A forked function, and what follows a wait, may run on one of torch's threads. Torch gives these threads the objects
that were stashed where they come from. So the context is stashed in front of every fork and wait; a thread that has a
context of its own does not look there.
"""

from __future__ import annotations

import threading
import weakref
from contextvars import Token

from farprop._torch import is_stashed_in_thread, remove_from_thread, stash_in_thread, stashed_in_thread
from farprop.runtime.gradients.contexts import Context, current_context

_KEY = "farprop.autograd.context"


class _Here(threading.local):
    """Tells threads apart: numbers of threads are used again."""

    def __init__(self) -> None:
        self.mark = object()


_here = _Here()


def carry_context() -> None:
    """Let the threads that go on from here have this thread's context."""
    context = current_context.get()
    if context is not None:
        stash_in_thread(_KEY, (weakref.ref(context), _here.mark))
    elif is_stashed_in_thread(_KEY) and stashed_in_thread(_KEY)[1] is _here.mark:
        remove_from_thread(_KEY)  # of a context that this thread is not in any more


def enter_carried_context() -> Token[Context | None] | None:
    """Make the context that was carried here current; what ``current_context.reset`` takes, if there is one."""
    if current_context.get() is not None or not is_stashed_in_thread(_KEY):
        return None
    reference, mark = stashed_in_thread(_KEY)
    context = reference()
    if mark is _here.mark or context is None or context.is_released:
        return None
    return current_context.set(context)
