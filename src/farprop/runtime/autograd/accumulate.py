"""Gradient accumulation at leaves, and hooks. Nothing is written to ``.grad``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from farprop._torch import (
    backward_hooks,
    post_accumulate_hooks,
    set_grad_enabled,
    sparse_indices,
    sparse_values,
    use_count,
)
from farprop.protocol.events import HOOK
from farprop.runtime.recorder import recorder

_ALONE = use_count(torch.empty(0))


def has_hooks(node: Any) -> bool:
    """Whether a leaf has hooks. They must see the complete gradient, once."""
    leaf = node.variable
    in_front, behind = hooks_of(node)
    return bool(backward_hooks(leaf) or post_accumulate_hooks(leaf) or in_front or behind)


def accumulated(leaf: torch.Tensor, old: torch.Tensor | None, gradient: torch.Tensor, is_alone: bool) -> torch.Tensor:
    """Add a gradient to a leaf's sum.

    Args:
        leaf: the leaf.
        old: the sum so far; None for the first gradient.
        gradient: the gradient. The first one becomes the sum without a copy if nothing else refers to it and it has the
            leaf's layout.
        is_alone: whether no other edge of the pass has the same gradient.
    """
    if old is not None:
        return add(old, gradient)
    is_alone = is_alone and use_count(gradient) == _ALONE
    if gradient.layout is not torch.strided:
        if not gradient.is_sparse:
            return gradient if is_alone else gradient.clone()
        tidy = sparse_indices(gradient).is_contiguous() and sparse_values(gradient).is_contiguous()
        return gradient if is_alone and tidy else gradient.clone()
    if leaf.layout is not torch.strided:
        return gradient.detach() if is_alone else gradient.detach().clone(memory_format=torch.contiguous_format)
    if gradient.stride() == leaf.stride():
        kept = gradient.detach() if gradient.requires_grad else gradient
        return kept if is_alone else kept.clone()
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient.detach())


def recorded_sum(leaf: torch.Tensor, old: torch.Tensor | None, gradient: torch.Tensor) -> torch.Tensor:
    """As ``accumulated``, in a recorded pass: the sum has a graph. It is new memory, in the leaf's layout."""
    if old is not None:
        return add(old, gradient)
    is_strided = gradient.layout is torch.strided and leaf.layout is torch.strided
    if is_strided and gradient.stride() != leaf.stride():
        return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
    return gradient.clone()


def add(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, sparse if both are. Out of place, because others may refer to either."""
    return new + old if old.is_sparse and not new.is_sparse else old + new


_KEY = "farprop.hooks"
Gradients = tuple[torch.Tensor | None, ...]


def hooks_of(node: Any) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """A node's live dictionaries of pre-hooks and post-hooks."""
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


def _run_hook(hook: Any, *args: Any) -> Any:
    if not recorder.is_on:
        return hook(*args)
    began = time.monotonic()
    try:
        return hook(*args)
    finally:
        recorder.span(HOOK, f"hook {getattr(hook, '__qualname__', type(hook).__name__)}", began)


def run_in_front(hooks: Mapping[int, Any], gradients: Gradients, create_graph: bool) -> Gradients:
    """Run the pre-hooks of a node; returns the gradients for the node. Hooks of a recorded pass run in grad mode."""
    before = torch.is_grad_enabled()
    try:
        set_grad_enabled(create_graph)
        for hook in list(hooks.values()):
            result = _run_hook(hook, gradients)
            if result is not None:
                gradients = result if isinstance(result, tuple) else (result,)
    finally:
        set_grad_enabled(before)
    return gradients


def run_behind(hooks: Mapping[int, Any], outputs: Gradients, gradients: Gradients, create_graph: bool) -> None:
    """Run the post-hooks of a node. Their results are ignored."""
    before = torch.is_grad_enabled()
    try:
        set_grad_enabled(create_graph)
        for hook in list(hooks.values()):
            _run_hook(hook, outputs, gradients)
    finally:
        set_grad_enabled(before)


def run_post_hooks(
    leaf: torch.Tensor, after: Any, behind: Mapping[int, Any], gradient: torch.Tensor, create_graph: bool
) -> None:
    """After accumulation, run a leaf's post-accumulate-grad hooks, then the post-hooks of its node, as torch does."""
    if after:
        before = torch.is_grad_enabled()
        try:
            set_grad_enabled(create_graph)
            for hook in list(after.values()):
                _run_hook(hook, leaf)
        finally:
            set_grad_enabled(before)
    if behind:
        run_behind(behind, (), (gradient,), create_graph)
