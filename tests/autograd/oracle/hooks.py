"""Hooks of programs: each call of one is noted, with what it saw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor

# A factor of 0 means that the hook leaves the gradient as it is.
ON_LEAVES = ("tensor", "before", "after", "accumulated")
ON_RESULTS = ("tensor", "before", "after", "retain")
ON_RECEIVED = ("received", "retain")  # the node of a message is another one in one process

_RAMP = torch.arange(1, 5000, dtype=torch.float64)


class Call(NamedTuple):
    """One call of a hook: which, what it saw (None for an undefined gradient), and whether grad was enabled."""

    hook: int
    seen: tuple[float | None, ...]
    grad_enabled: bool


def print_of(gradient: Tensor | None) -> float | None:
    """One number that another gradient hardly has."""
    if gradient is None:
        return None
    with torch.no_grad():
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        if dense.is_complex():
            dense = torch.view_as_real(dense.resolve_conj())
        flat = dense.reshape(-1).double()
        return float(flat @ _RAMP[: flat.numel()])


def register(tensor: Tensor, kind: str, number: int, factor: int, log: list[Call], kept: list[Any]) -> None:
    """Put a hook on a tensor, or on the node in front of it."""

    def note(*gradients: Tensor | None) -> None:
        log.append(Call(number, tuple(map(print_of, gradients)), torch.is_grad_enabled()))

    def scaled(gradients: tuple[Tensor | None, ...]) -> Any:
        note(*gradients)
        return tuple(None if g is None else g * factor for g in gradients) if factor else None

    def on_tensor(gradient: Tensor | None) -> Any:
        note(gradient)
        return gradient * factor if factor and gradient is not None else None

    # Torch crashes if it finds out while it registers a hook that what this is a view of was changed in place.
    _ = tensor.grad_fn
    if kind == "tensor":
        tensor.register_hook(on_tensor)
    elif kind == "received":
        # Of a message of several tensors, the hooks of those that are not used see None if another is used.
        tensor.register_hook(lambda gradient: None if gradient is None else on_tensor(gradient))
    elif kind == "accumulated":
        tensor.register_post_accumulate_grad_hook(lambda _: note())
    elif kind == "retain":
        tensor.retain_grad()
        kept.append((number, tensor))
    else:
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        kept.append((-1, node))  # nobody else holds the node of a leaf all the time
        if kind == "before":
            node.register_prehook(scaled)
        else:
            node.register_hook(_after(scaled, note))


def _after(scaled: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def hook(results: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> Any:
        if not results:  # of a leaf
            return note(*gradients)
        return scaled(results)

    return hook
