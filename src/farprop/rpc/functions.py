"""Decorators for functions that are called by others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def async_execution(fn: _F) -> _F:
    """Mark a function that returns a ``torch.futures.Future``: its thread is free until the future is done.

    The caller gets the future's value. Use it where a function would wait, for other calls or for other workers, so
    that many can wait at once. With ``@staticmethod`` or ``@classmethod`` it is the inner decorator, with
    ``@torch.jit.script`` the outer one.

    An ``async def`` function needs no decorator.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper  # type: ignore[return-value]
