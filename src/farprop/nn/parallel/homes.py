"""Where the gradients of a backward pass live: in ``.grad``, or in a distributed autograd context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from farprop._torch import foreach_copy
from farprop.runtime.gradients.local import LocalPass


class Home(Protocol):
    """One backward pass's place for gradients."""

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        """The gradient that the pass has left there."""

    def put(self, leaves: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]) -> None:
        """The gradients after reduction, which are memory of the bucket."""


class InGrad:
    """A pass of torch's own. ``as_views``: the bucket's memory is the gradient."""

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


class InContext:
    """A distributed pass. The context's tensors are never written to, so the reduced ones are copies."""

    def __init__(self, running: LocalPass) -> None:
        self._pass = running

    def get(self, leaf: torch.Tensor) -> torch.Tensor | None:
        return self._pass.context.gradients.get(leaf)

    def put(self, leaves: Sequence[torch.Tensor], reduced: Sequence[torch.Tensor]) -> None:
        for leaf, gradient in zip(leaves, reduced, strict=True):
            self._pass.replace(leaf, gradient.clone())
