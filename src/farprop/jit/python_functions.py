"""Python functions that compiled code calls, with the compiler's own types in their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from farprop._torch import AnyType, NoneType, ignore

JitType: TypeAlias = Any  # one of the compiler's types; torch's stubs don't relate them
ANY: JitType = AnyType.get()
NONE: JitType = NoneType.get()


def python_function(function: Any, name: str, result: JitType, **parameters: JitType) -> Callable[..., Any]:
    """Have the compiler leave ``function``, which was made for it, in Python, and take these types for its own.

    Graphs show it by its name.
    """
    position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__name__ = function.__qualname__ = name
    function.__signature__ = inspect.Signature(
        [inspect.Parameter(parameter, position, annotation=kind) for parameter, kind in parameters.items()],
        return_annotation=result,
    )
    function.is_farprops = True
    return ignore(function)  # type: ignore[no-any-return]
