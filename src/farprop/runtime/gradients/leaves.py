"""What happens at a leaf: its hooks, and the sum of its gradients. Nothing is written to ``.grad``."""

from __future__ import annotations

from typing import Any

import torch

from farprop._torch import backward_hooks, post_accumulate_hooks, sparse_indices, sparse_values, use_count
from farprop.runtime.gradients.hooks import hooks_of, run_behind, run_in_front

_ALONE = use_count(torch.empty(0))


def has_hooks(node: Any) -> bool:
    """Whether anything of a user's has to see the gradient of this leaf, and see all of it at once."""
    leaf = node.variable
    in_front, behind = hooks_of(node)
    return bool(backward_hooks(leaf) or post_accumulate_hooks(leaf) or in_front or behind)


def through_hooks(node: Any, gradient: torch.Tensor) -> torch.Tensor | None:
    """The gradient to add, after the hooks in front of the node. The hooks of the tensor itself have run."""
    return run_in_front(node, (gradient,))[0]


def tell_hooks(node: Any, gradient: torch.Tensor) -> None:
    """The gradient was added: run the hooks for after accumulation, then those behind the node, as torch does."""
    leaf = node.variable
    after = post_accumulate_hooks(leaf)
    if after:
        with torch.no_grad():
            for hook in list(after.values()):
                hook(leaf)
    run_behind(node, (), (gradient,))


def first_gradient(leaf: torch.Tensor, gradient: torch.Tensor, is_alone: bool) -> torch.Tensor:
    """What to keep of a leaf's first gradient: itself, if nobody else has it and it has the leaf's layout."""
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


def add(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, sparse if both are. Out of place: others may have either."""
    return new + old if old.is_sparse and not new.is_sparse else old + new
