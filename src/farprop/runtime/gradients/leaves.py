"""What happens at a leaf: its hooks, and the sum of its gradients.

Torch runs the hooks of the node in front of a leaf only when it writes to ``.grad``, which we never do. A node shows
its hooks to nobody, but whoever registers one gets a handle to the dictionary of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_KEY = "farprop.hooks"
_ALONE = torch.empty(0)._use_count()  # type: ignore[attr-defined]


def has_hooks(node: Any) -> bool:
    """Whether anything of a user's has to see the gradient of this leaf, and see all of it at once."""
    leaf = node.variable
    before, after = _hooks_of(node)
    return bool(leaf._backward_hooks or leaf._post_accumulate_grad_hooks or before or after)


def _hooks_of(node: Any) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """The hooks before and after the node, as they are now and will be."""
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


def through_hooks(node: Any, gradient: torch.Tensor) -> torch.Tensor | None:
    """The gradient to add, after the hooks in front of the node. The hooks of the tensor itself have run."""
    hooks = _hooks_of(node)[0]
    if not hooks:
        return gradient
    after: torch.Tensor | None = gradient
    with torch.no_grad():
        for hook in list(hooks.values()):
            result = hook((after,))
            if result is not None:
                after = result[0] if isinstance(result, tuple) else result
    return after


def tell_hooks(node: Any, gradient: torch.Tensor) -> None:
    """The gradient was added: run the hooks for after accumulation, then those behind the node, as torch does."""
    leaf = node.variable
    behind, after = _hooks_of(node)[1], leaf._post_accumulate_grad_hooks
    if behind or after:
        with torch.no_grad():
            for hook in list((after or {}).values()):
                hook(leaf)
            for hook in list(behind.values()):
                hook((), (gradient,))


def first_gradient(leaf: torch.Tensor, gradient: torch.Tensor, is_alone: bool) -> torch.Tensor:
    """What to keep of a leaf's first gradient: itself, if nobody else has it and it has the leaf's layout."""
    is_alone = is_alone and gradient._use_count() == _ALONE  # type: ignore[attr-defined]
    if gradient.layout is not torch.strided:
        if not gradient.is_sparse:
            return gradient if is_alone else gradient.clone()
        tidy = gradient._indices().is_contiguous() and gradient._values().is_contiguous()
        return gradient if is_alone and tidy else gradient.clone()
    if leaf.layout is not torch.strided:
        return gradient.detach() if is_alone else gradient.detach().clone(memory_format=torch.contiguous_format)
    if is_alone and gradient.stride() == leaf.stride():
        return gradient.detach() if gradient.requires_grad else gradient
    return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient.detach())


def add(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The sum of two gradients, sparse if both are. Out of place: others may have either."""
    return new + old if old.is_sparse and not new.is_sparse else old + new
