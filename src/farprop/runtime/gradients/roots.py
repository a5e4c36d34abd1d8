"""Where a backward pass starts: tensors that a user gives, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farprop.errors import UsageError
from farprop.runtime.gradients.space import GradientSpace


def backward_from(
    space: GradientSpace, context_id: int, roots: Sequence[Any], retain_graph: bool, fast: bool, timeout: float
) -> None:
    """Run the backward pass of a context from these scalars."""
    context = space.contexts.find(context_id)
    edges = tuple(_edge_of(root) for root in roots)
    if not edges:
        raise UsageError("No tensors provided for gradient computation.")
    gradients = [torch.ones_like(root, requires_grad=False) for root in roots]
    space.backward(context, edges, list(gradients), retain_graph, fast, timeout)


def _edge_of(root: Any) -> tuple[Any, int]:
    if not isinstance(root, torch.Tensor):
        raise TypeError(
            f"backward(): incompatible function arguments: roots are tensors, but one is {type(root).__name__}."
        )
    if not root.requires_grad:
        raise UsageError(f"requires_grad not set on: root of shape {tuple(root.shape)}. It has no gradient.")
    if root.numel() != 1:
        raise UsageError(
            f"A root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar. Take its sum or mean."
        )
    if root.grad_fn is None:
        raise UsageError(
            "A root does not have a valid gradient function: it is a leaf, and was not computed from anything."
        )
    return root.grad_fn, root.output_nr


def backward_on_owner(
    space: GradientSpace, value: Any, context_id: int, retain_graph: bool, fast: bool, timeout: float
) -> None:
    """``RRef.backward`` where the value is. Without a context (-1) it is a pass of torch's own."""
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"RRef should contain a tensor for .backward(), but it contains {type(value).__name__}.")
    if context_id != -1:
        backward_from(space, context_id, [value], retain_graph, fast, timeout)
        return
    if not value.requires_grad:
        raise UsageError("The RRef's tensors does not require grad and does not have a grad_fn: there is no graph.")
    torch.autograd.backward([value], retain_graph=retain_graph)
