"""Functions that ``torch.compile`` leaves alone.

A compiled function that calls one of them is cut in two there, and nothing of farprop's is traced or compiled.
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
    """Have ``torch.compile`` run the function, and all that it calls, as it is."""
    skip_in_compiler(function, _WHY)
    return function


def uncompiled_itself(function: _F) -> _F:
    """Have ``torch.compile`` run the function as it is; what it calls is compiled."""
    skip_in_compiler(function, _WHY, with_callees=False)
    return function


def uncompiled_methods(kind: type[_T]) -> type[_T]:
    """Have ``torch.compile`` run all methods that a class defines as they are. Not those of classes derived from it."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            uncompiled(method)
    return kind
