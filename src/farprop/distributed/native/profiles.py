"""Collectives in torch's profiles: events with the names that other backends give theirs, behind ``farprop:``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farprop._torch import enter_record, exit_record, profiler_enabled


def begin(name: str, tensors: Sequence[torch.Tensor]) -> Any:
    """The event of what begins now, for :func:`end`; None if this thread is not profiled."""
    return enter_record(f"farprop:{name}", *tensors) if profiler_enabled() else None


def end(event: Any) -> None:
    """In any thread. An event that ends in another one than it began in is asynchronous to torch."""
    if event is not None:
        exit_record(event)
