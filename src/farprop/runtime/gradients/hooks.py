"""Hooks of nodes that the engine stops at, and so does not run.

A node shows its hooks to nobody, but whoever registers one gets a handle to the dictionary of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_KEY = "farprop.hooks"
Gradients = tuple[torch.Tensor | None, ...]


def hooks_of(node: Any) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks in front of the node and behind it, as they are now and will be."""
    metadata = node.metadata
    hooks = metadata.get(_KEY)
    if hooks is None:
        hooks = metadata[_KEY] = _dictionary(node.register_prehook), _dictionary(node.register_hook)
    return hooks  # type: ignore[no-any-return]


def _dictionary(register: Any) -> Mapping[int, Any]:
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    del hooks[handle.id]
    return hooks  # type: ignore[no-any-return]


def _nothing(*gradients: Any) -> None:
    return None


def run_in_front(node: Any, gradients: Gradients) -> Gradients:
    """The gradients that the node gets."""
    hooks = hooks_of(node)[0]
    if hooks:
        with torch.no_grad():
            for hook in list(hooks.values()):
                result = hook(gradients)
                if result is not None:
                    gradients = result if isinstance(result, tuple) else (result,)
    return gradients


def run_behind(node: Any, outputs: Gradients, gradients: Gradients) -> None:
    """The node has run; what these hooks return goes nowhere."""
    hooks = hooks_of(node)[1]
    if hooks:
        with torch.no_grad():
            for hook in list(hooks.values()):
                hook(outputs, gradients)
