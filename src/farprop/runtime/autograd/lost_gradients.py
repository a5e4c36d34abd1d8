"""Tensors that were computed on one worker and sent to another without an autograd context.

They arrive as leaves, and their graph stays behind: a backward pass ends at them. Such a message has the flag ``CUT``.
Its tensors get a hook that warns when a pass reaches one of them, once for each function.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from farprop.errors import LostGradientWarning
from farprop.wire.codec import decode_with

_R = TypeVar("_R")
_PROXIES = "farprop.rpc.rref_proxy:"
_LIBRARIES = tuple(f"{place}{os.sep}" for place in (Path(__file__).parents[2], Path(torch.__file__).parent))
_warned: set[str] = set()  # functions


def receive_cut(
    what: str, function: str, worker: str, refs: Sequence[Any], decoder: Callable[..., _R], *args: Any
) -> _R:
    """Decode a message with the flag ``CUT``.

    Args:
        what: ``"the result"`` or ``"an argument"``.
        function: the function that was called.
        worker: the worker that the message came from.
        refs: the references of the message.
        decoder: called with ``args``.
        args: the decoder's arguments.

    Returns:
        The decoder's result.
    """
    if function.startswith(_PROXIES) or function == "__call__":
        function = "a method of a reference's value (called with rref.rpc_sync() or a RemoteModule)"
    tensors: list[torch.Tensor] = []
    value = decode_with(refs, tensors, decoder, *args)
    is_watched = function not in _warned and torch.is_grad_enabled()
    for tensor in tensors:
        tensor.requires_grad_()
        if is_watched:
            tensor.register_post_accumulate_grad_hook(partial(_on_gradient, what, function, worker))
    return value


def _on_gradient(what: str, function: str, worker: str, leaf: torch.Tensor) -> None:
    if function in _warned:
        return
    _warned.add(function)
    warnings.warn(
        f"A backward pass ends at {what} of {function}, which {worker} has computed: the call was made without an "
        f"autograd context, so the graph on {worker} gets no gradient. Make the call in `with "
        "farprop.autograd.context() as context_id:`, and run farprop.autograd.backward(context_id, [loss]) there. If "
        "it is meant to end there, send the tensor without its graph: tensor.detach().",
        LostGradientWarning,
        stacklevel=_level_of_program(),
    )


def _level_of_program() -> int:
    """The ``stacklevel`` for the caller of this function that names the program's line: the one that called torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_LIBRARIES):
        if frame.f_back is None:
            return 2  # a thread of torch's
        level, frame = level + 1, frame.f_back
    return level
