"""The autograd context of compiled code that torch has moved to a thread of its own.

A forked function, and what follows a wait, may run on one of torch's threads. Torch gives these threads the objects
that were stashed where they come from. So the context is stashed in front of every fork and wait; a thread that has a
context of its own does not look there.
"""

from __future__ import annotations

import threading
import weakref
from contextvars import Token

import torch

from farprop.runtime.gradients.contexts import Context, current_context

_KEY = "farprop.autograd.context"
_is_stashed = torch._C._is_key_in_tls
_stashed = torch._C._get_obj_in_tls


class _Here(threading.local):
    """Tells threads apart: numbers of threads are used again."""

    def __init__(self) -> None:
        self.mark = object()


_here = _Here()


def carry_context() -> None:
    """Let the threads that go on from here have this thread's context."""
    context = current_context.get()
    if context is not None:
        torch._C._stash_obj_in_tls(_KEY, (weakref.ref(context), _here.mark))
    elif _is_stashed(_KEY) and _stashed(_KEY)[1] is _here.mark:
        torch._C._remove_obj_from_tls(_KEY)  # of a context that this thread is not in any more


def enter_carried_context() -> Token[Context | None] | None:
    """Make the context that was carried here current; what ``current_context.reset`` takes, if there is one."""
    if current_context.get() is not None or not _is_stashed(_KEY):
        return None
    reference, mark = _stashed(_KEY)
    context = reference()
    if mark is _here.mark or context is None or context.is_released:
        return None
    return current_context.set(context)
