"""Decorators for functions that ``torch.compile`` must not trace.

A call of such a function is a graph break: none of farprop's code is traced or compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from farprop._torch import skip_in_compiler

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_WHY = "farprop talks to other workers here"


def uncompiled(function: _F) -> _F:
    """Exclude a function and everything that it calls from ``torch.compile``."""
    skip_in_compiler(function, _WHY)
    return function


def uncompiled_itself(function: _F) -> _F:
    """Exclude a function from ``torch.compile``, but not the functions that it calls."""
    skip_in_compiler(function, _WHY, with_callees=False)
    return function


def uncompiled_methods(kind: type[_T]) -> type[_T]:
    """Exclude all methods that a class itself defines from ``torch.compile``."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            uncompiled(method)
    return kind
