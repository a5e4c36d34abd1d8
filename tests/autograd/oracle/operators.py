"""What an ``op`` step computes: by name, from tensors and parameters to a tuple of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import embedding, embedding_bag

from tests.autograd.oracle import functions as f

Tensor = torch.Tensor


def _bag(weight: Tensor, rows: list[int], starts: list[int], is_sparse: bool) -> Tensor:
    return embedding_bag(torch.tensor(rows), weight, torch.tensor(starts), mode="sum", sparse=is_sparse)


def _zero_part(x: Tensor, dim: int) -> Tensor:
    """Writes to a view, which changes the graph of what it is a view of."""
    x.narrow(dim, 0, 1).mul_(0)
    return x


def _write_part(x: Tensor, y: Tensor) -> Tensor:
    x.select(0, 0).copy_(y.sum())
    return x


def _packed(x: Tensor, y: Tensor) -> Tensor:
    """What is saved for the backward pass is kept in another form, as torch's checkpoints do."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 2, t.shape), lambda kept: kept[0] / 2):
        return x * y + y


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y,
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
    "dirty_": f.Dirty.apply,
    # Functions of users
    "scaled": f.Scaled.apply,
    "two": f.Two.apply,
    "picky": f.Picky.apply,
    "silent": f.Silent.apply,
    "same": f.Same.apply,
    "half": f.Half.apply,
    "nested": f.Nested.apply,
}

IN_PLACE = frozenset(name for name in OPERATORS if name.endswith("_"))


def compute(name: str, tensors: list[Tensor], parameters: tuple[Any, ...]) -> tuple[Any, ...]:
    result = OPERATORS[name](*tensors, *parameters)
    return tuple(result) if isinstance(result, tuple | list) else (result,)
