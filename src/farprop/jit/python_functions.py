"""Python functions that compiled code calls, with the compiler's own types in their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch._jit_internal import ignore

Type = torch._C.Type
ANY = torch._C.AnyType.get()
NONE = torch._C.NoneType.get()


def python_function(function: Callable[..., Any], name: str, result: Type, **parameters: Type) -> Callable[..., Any]:
    """Have the compiler leave ``function``, which was made for it, in Python, and take these types for its own.

    Graphs show it by its name.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(parameter, kind, annotation=type) for parameter, type in parameters.items()],
        return_annotation=result,
    )
    return ignore(function)  # type: ignore[no-any-return]
