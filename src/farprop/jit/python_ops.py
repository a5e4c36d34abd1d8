"""Python functions that compiled code calls, and the autograd context that they run in.

Torch may run a forked function, and the code after a wait, on one of its own threads. It gives those threads the
objects that were stashed in the thread they come from. So :func:`carry_context` stashes the autograd context before
every fork and wait, and :func:`enter_carried_context` makes it current in a thread that has no context of its own.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from contextvars import Token
from typing import Any, TypeAlias

from farprop import autograd
from farprop._torch import (
    AnyType,
    DictType,
    IntType,
    ListType,
    NoneType,
    TensorType,
    ignore,
    is_stashed_in_thread,
    remove_from_thread,
    stash_in_thread,
    stashed_in_thread,
)
from farprop.runtime.autograd.contexts import Context, current_context

JitType: TypeAlias = Any  # one of the compiler's types; torch's stubs don't relate them
ANY: JitType = AnyType.get()
NONE: JitType = NoneType.get()
_INT, _TENSOR = IntType.get(), TensorType.get()

_KEY = "farprop.autograd.context"


def python_function(function: Any, name: str, result: JitType, **parameters: JitType) -> Callable[..., Any]:
    """Give a Python function the compiler's own types, and have the compiler leave it in Python.

    Args:
        function: The function. It is changed, so it has to be made for this purpose.
        name: The name that graphs show.
        result: The type of its result.
        **parameters: The types of its parameters.

    Returns:
        The function, for compiled code to call.
    """
    position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(parameter, position, annotation=kind) for parameter, kind in parameters.items()],
        return_annotation=result,
    )
    function.is_farprop_function = True
    return ignore(function)  # type: ignore[no-any-return]


# farprop.autograd


def _get_gradients(context_id: Any) -> Any:
    return autograd.get_gradients(context_id)


def _backward(context_id: Any, roots: Any, retain_graph: Any, create_graph: Any, mode: Any, timeout: Any) -> None:
    graphs = {"retain_graph": bool(retain_graph), "create_graph": bool(create_graph)}
    autograd.backward(context_id, roots, **graphs, mode=mode, timeout=timeout)


get_gradients = python_function(_get_gradients, "get_gradients", DictType(_TENSOR, _TENSOR), context_id=_INT)
dist_backward = python_function(
    _backward,
    "dist_backward",
    NONE,
    context_id=_INT,
    roots=ListType(_TENSOR),
    retain_graph=ANY,
    create_graph=ANY,
    mode=ANY,
    timeout=ANY,
)


# The autograd context


class _ThreadMark(threading.local):
    """Tells threads apart. Thread ids can't: they are reused."""

    def __init__(self) -> None:
        self.mark = object()


_thread = _ThreadMark()


def carry_context() -> None:
    """Let torch's threads that continue this thread's code have its autograd context."""
    context = current_context.get()
    if context is not None:
        stash_in_thread(_KEY, (weakref.ref(context), _thread.mark))
    elif is_stashed_in_thread(_KEY) and stashed_in_thread(_KEY)[1] is _thread.mark:
        remove_from_thread(_KEY)  # this thread has left that context


def enter_carried_context() -> Token[Context | None] | None:
    """Make the context that was carried to this thread current, if any. Pass the token to ``current_context.reset``."""
    if current_context.get() is not None or not is_stashed_in_thread(_KEY):
        return None
    reference, mark = stashed_in_thread(_KEY)
    context = reference()
    if mark is _thread.mark or context is None or context.is_released:
        return None
    return current_context.set(context)
