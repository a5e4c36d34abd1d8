"""What an ``op`` step computes: by name, from tensors and parameters to a tuple of tensors.

Some operators are autograd functions, as users write them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding, embedding_bag

Tensor = torch.Tensor


class Scaled(torch.autograd.Function):
    """Saves tensors, and has an argument that is not a tensor."""

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
    """Two outputs and two inputs. An unused output gets None as its gradient, and passes None on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 3, y * 2

    @staticmethod
    def backward(ctx: Any, one: Tensor | None, two: Tensor | None) -> Any:
        return None if one is None else one * 3, None if two is None else two * 2


class Silent(torch.autograd.Function):
    """Its second input never gets a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y.detach().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class Same(torch.autograd.Function):
    """Returns the same tensor as the gradient of both inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, gradient


class Dirty(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Half(torch.autograd.Function):
    """One of two outputs is not differentiable."""

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


def _bag(weight: Tensor, rows: list[int], starts: list[int], is_sparse: bool) -> Tensor:
    return embedding_bag(torch.tensor(rows), weight, torch.tensor(starts), mode="sum", sparse=is_sparse)


def _zero_part(x: Tensor, dim: int) -> Tensor:
    """Writes to a view, which changes the graph of its base."""
    x.narrow(dim, 0, 1).mul_(0)
    return x


def _write_part(x: Tensor, y: Tensor) -> Tensor:
    x.select(0, 0).copy_(y.sum())
    return x


def _packed(x: Tensor, y: Tensor) -> Tensor:
    """Packs saved tensors with hooks, as torch's checkpoints do."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 2, t.shape), lambda kept: kept[0] / 2):
        return x * y + y


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y,
    "mixed": lambda x, y: torch.mm(x.float(), y.float()).double(),  # autocast changes it
    "addmm": lambda x, y, z: torch.addmm(x, y, z),
    "neg": lambda x: -x,
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sin": torch.sin,
    "clone": torch.clone,
    "detach": lambda x: x.detach(),
    "double": lambda x: x + x,
    "square": lambda x: x * x,
    "sum": lambda x, dims, keep: x.sum(dims, keepdim=keep),
    "total": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "cumsum": lambda x, dim: x.cumsum(dim),
    "stack": lambda *xs: torch.stack(xs[:-1], xs[-1]),
    "cat": lambda *xs: torch.cat(xs[:-1], xs[-1]),
    "split": lambda x, size, dim: x.split(size, dim),
    "unbind": lambda x, dim: x.unbind(dim),
    "largest": lambda x, dim: x.max(dim),
    "index_select": lambda x, dim, index: x.index_select(dim, torch.tensor(index)),
    "transpose": lambda x, a, b: x.transpose(a, b),
    "narrow": lambda x, dim, start, length: x.narrow(dim, start, length),
    "select": lambda x, dim, index: x.select(dim, index),
    "reshape": lambda x, shape: x.reshape(shape),
    "flat": lambda x: x.flatten(),
    "expand": lambda x, count: x.unsqueeze(0).expand(count, *x.shape),
    "flip": lambda x, dim: x.flip(dim),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "single": lambda x: x.float().double(),
    "to_single": lambda x: x.float(),
    "to_double": lambda x: x.double(),
    "complex": lambda x, y: torch.complex(x, y),
    "conj": lambda x: x.conj(),
    "parts": lambda x: torch.view_as_real(x.resolve_conj()),
    "imag": lambda x: x.imag,
    "bag": _bag,
    "embedding": lambda weight, rows, is_sparse: embedding(torch.tensor(rows), weight, sparse=is_sparse),
    "nothing": lambda x: x[:0],
    "of_nothing": lambda x: x.sum() * 2,
    "packed": _packed,
    # In place
    "add_": lambda x, y: x.add_(y),
    "scale_": lambda x, factor: x.mul_(factor),
    "relu_": torch.relu_,
    "zero_part_": _zero_part,
    "write_part_": _write_part,
    "fill_": lambda x: x.zero_(),
    "dirty_": Dirty.apply,
    # Functions of users
    "scaled": Scaled.apply,
    "two": Two.apply,
    "picky": Picky.apply,
    "silent": Silent.apply,
    "same": Same.apply,
    "half": Half.apply,
    "nested": Nested.apply,
}

IN_PLACE = frozenset(name for name in OPERATORS if name.endswith("_"))


def compute(name: str, tensors: list[Tensor], parameters: tuple[Any, ...]) -> tuple[Any, ...]:
    result = OPERATORS[name](*tensors, *parameters)
    return tuple(result) if isinstance(result, tuple | list) else (result,)
