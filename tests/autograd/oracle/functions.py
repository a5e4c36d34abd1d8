"""Autograd functions of users."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

Tensor = torch.Tensor


class Scaled(torch.autograd.Function):
    """Saves tensors, and has a parameter that is none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: int) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.factor = factor
        return x * y * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return gradient * y * ctx.factor, gradient * x * ctx.factor, None


class Two(torch.autograd.Function):
    """Two outputs; an unused one gets zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x + 1

    @staticmethod
    def backward(ctx: Any, one: Tensor, two: Tensor) -> Tensor:
        return one * 2 + two


class Picky(torch.autograd.Function):
    """Two outputs and two inputs; what was not used gets None, and so does what comes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 3, y * 2

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, two: Tensor | None) -> Any:
        return None if one is None else one * 3, None if two is None else two * 2


class Silent(torch.autograd.Function):
    """Never gives its second input a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y.detach().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Same(torch.autograd.Function):
    """Gives one and the same tensor to both inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient


class Dirty(torch.autograd.Function):
    """Changes its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Half(torch.autograd.Function):
    """One output can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        signs = x.sign()
        ctx.mark_non_differentiable(signs)
        ctx.save_for_backward(signs)
        return x * signs, signs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class Nested(torch.autograd.Function):
    """Runs torch's engine inside of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad((x * x * gradient).sum(), x)[0]
