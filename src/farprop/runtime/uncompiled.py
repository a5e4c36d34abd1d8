"""Functions that ``torch.compile`` leaves alone.

A compiled function that calls one of them is cut in two there, and nothing of farprop's is traced or compiled. Torch
has decorators for this, but they import its compiler, which takes seconds, and cost time at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

_F = TypeVar("_F", bound=Callable[..., Any])

_WHY = "farprop talks to other workers here"
_SKIP = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def uncompiled(function: _F) -> _F:
    """Have ``torch.compile`` run the function, and all that it calls, as it is."""
    set_code_exec_strategy(function.__code__, _SKIP)
    # The tracer asks for these when it meets a call of the function.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _WHY  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    return function
