"""Collectives in torch's profiles: events with the names that other backends give theirs, behind ``farprop:``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_is_profiling = torch.autograd._profiler_enabled
_enter = torch.autograd._record_function_with_args_enter
_exit = torch.autograd._record_function_with_args_exit


def begin(name: str, tensors: Sequence[torch.Tensor]) -> Any:
    """The event of what begins now, for :func:`end`; None if this thread is not profiled."""
    return _enter(f"farprop:{name}", *tensors) if _is_profiling() else None


def end(event: Any) -> None:
    """In any thread. An event that ends in another one than it began in is asynchronous to torch."""
    if event is not None:
        _exit(event)
