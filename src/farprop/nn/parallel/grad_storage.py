"""Where the gradients of a backward pass are stored: in ``.grad``, or in a distributed autograd context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from farprop._torch import foreach_copy
from farprop.runtime.autograd.engine import LocalPass


class GradStorage(Protocol):
    """The storage of one backward pass's gradients."""

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The gradient that the pass has accumulated for a leaf."""

    def put(self, leaves: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]) -> None:
        """Store reduced gradients, which are views of a bucket's buffer."""


class GradAttribute:
    """Torch's own pass: gradients are in ``.grad``.

    Args:
        as_views: Whether ``.grad`` becomes a view of the bucket's buffer instead of a copy.
    """

    def __init__(self, as_views: bool) -> None:
        self.as_views = as_views

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        return leaf.grad

    def put(self, leaves: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]) -> None:
        if self.as_views or reduced[0].is_sparse:
            for leaf, gradient in zip(leaves, reduced, strict=True):
                if leaf.grad is not gradient:
                    leaf.grad = gradient
            return
        for leaf in leaves:
            if leaf.grad is None:
                leaf.grad = torch.empty_like(leaf)
        foreach_copy([leaf.grad for leaf in leaves if leaf.grad is not None], list(reduced))


class ContextGradients:
    """A distributed pass: gradients are in its context, whose tensors are never written to, so copies are stored."""

    def __init__(self, running: LocalPass) -> None:
        self._pass = running

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        return self._pass.context.gradients.get(leaf)

    def put(self, leaves: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]) -> None:
        for leaf, gradient in zip(leaves, reduced, strict=True):
            self._pass.replace(leaf, gradient.clone())
