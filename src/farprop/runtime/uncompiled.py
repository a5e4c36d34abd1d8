"""Functions that ``torch.compile`` leaves alone.

A compiled function that calls one of them is cut in two there, and nothing of farprop's is traced or compiled. Torch
has decorators for this, but they import its compiler, which takes seconds, and cost time at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_F = TypeVar("_F", bound=Callable[..., Any])
_T = TypeVar("_T")

_WHY = "farprop talks to other workers here"
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
_SKIP_ITSELF = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT)


def uncompiled(function: _F) -> _F:
    """Have ``torch.compile`` run the function, and all that it calls, as it is."""
    return _marked(function, _SKIP, is_all_of_it=True)


def uncompiled_itself(function: _F) -> _F:
    """Have ``torch.compile`` run the function as it is; what it calls is compiled."""
    return _marked(function, _SKIP_ITSELF, is_all_of_it=False)


def uncompiled_methods(kind: type[_T]) -> type[_T]:
    """Have ``torch.compile`` run all methods that a class defines as they are. Not those of classes derived from it."""
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            uncompiled(method)
    return kind


def _marked(function: _F, strategy: _FrameExecStrategy, is_all_of_it: bool) -> _F:
    set_code_exec_strategy(function.__code__, strategy)
    # The tracer asks for these when it meets a call of the function.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = is_all_of_it  # type: ignore[attr-defined]
    return function
