"""The arguments of calls: their types, and checks for common mistakes.

A type checker compares ``args=(a, b)`` with the parameters of the called function, and the called function tells the
type of the result. The functions that make calls have these overloads for it, in this order: a checker takes the first
that fits, and an error of Pyright's is about the last.

1. The function's name, in a restricted job: the result is ``Any``.
2. A list, or keyword arguments: only the result is known.
3. No arguments.
4. A function with ``*args``: only the result is known.
5. A tuple: its items are checked, too.

Each comes twice: with ``Later``, the result is what a coroutine returns or a future holds.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeAlias, TypeVar

import torch

from farprop.ids import WorkerInfo

_R = TypeVar("_R")

To: TypeAlias = str | int | WorkerInfo
Args: TypeAlias = tuple[Any, ...] | list[Any]
Kwargs: TypeAlias = Mapping[str, Any]
Later: TypeAlias = Coroutine[Any, Any, _R] | torch.futures.Future[_R]
# Functions with a fixed number of parameters don't fit; the number of those before ``*args`` does not matter.
Variadic: TypeAlias = Callable[[Any, Any, Any, Any, Any, Any, Any, Any, *tuple[Any, ...]], _R]


def args_of(args: Any, what: str = "args") -> tuple[Any, ...]:
    """Check the positional arguments that a program gave.

    Args:
        args: A tuple, a list, or None.
        what: How the error should call it.

    Returns:
        A tuple.

    Raises:
        TypeError: It is something else, most often a value without the comma that makes it a tuple.
    """
    if args is None:
        return ()
    if isinstance(args, tuple | list):
        return tuple(args)
    prefix = "args=" if what == "args" else ""
    raise TypeError(
        f"{what} should be a tuple of the function's arguments, but is a {type(args).__name__}. To pass it as the only "
        f"argument, write a comma: {prefix}(x,) is a tuple, and {prefix}(x) is x itself."
    )


def kwargs_of(kwargs: Any) -> dict[str, Any]:
    """Check the keyword arguments that a program gave.

    Args:
        kwargs: A dict or another mapping, or None.

    Returns:
        A dict.

    Raises:
        TypeError: It is something else.
    """
    if kwargs is None:
        return {}
    if isinstance(kwargs, Mapping):
        return dict(kwargs)
    raise TypeError(
        f"kwargs should be a dict of the function's keyword arguments, but is a {type(kwargs).__name__}. Write "
        'kwargs={"name": value}.'
    )
