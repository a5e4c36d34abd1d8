"""Which operators can be applied to which tensors: for each name, a function that finds inputs and parameters.

It gets a random generator and the tensors to choose from, by register. It returns (registers, parameters), or None if
no tensor fits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensor = torch.Tensor
Choice = tuple[tuple[int, ...], tuple[Any, ...]] | None
Chooser = Callable[[random.Random, Mapping[int, Tensor]], Choice]


def _pick(rng: random.Random, tensors: Mapping[int, Tensor], fits: Callable[[Tensor], bool]) -> int | None:
    fitting = [register for register, tensor in tensors.items() if fits(tensor)]
    # Prefers later tensors, so that graphs get deep.
    return None if not fitting else fitting[max(rng.randrange(len(fitting)), rng.randrange(len(fitting)))]


def _real(x: Tensor) -> bool:
    return x.dtype == torch.float64 and x.numel() > 0


def _one(fits: Callable[[Tensor], bool] = _real) -> Chooser:
    def choose(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
        x = _pick(rng, tensors, fits)
        return None if x is None else ((x,), ())

    return choose


def _two(fit: Callable[[Tensor, Tensor], bool]) -> Chooser:
    def choose(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
        x = _pick(rng, tensors, _real)
        y = None if x is None else _pick(rng, tensors, lambda y: _real(y) and fit(tensors[x], y))
        return None if x is None or y is None else ((x, y), ())

    return choose


def _broadcast(x: Tensor, y: Tensor) -> bool:
    try:
        return max(torch.broadcast_shapes(x.shape, y.shape), default=1) < 200
    except RuntimeError:
        return False


def _same_shape(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape


def _into(x: Tensor, y: Tensor) -> bool:
    return _broadcast(x, y) and torch.broadcast_shapes(x.shape, y.shape) == x.shape


def _multiplies(x: Tensor, y: Tensor) -> bool:
    return x.dim() == 2 and y.dim() == 2 and x.shape[1] == y.shape[0]


def _dim(parameters: Callable[[random.Random, Tensor, int], tuple[Any, ...]], dims: int = 1) -> Chooser:
    """An operator along a dimension."""

    def choose(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
        x = _pick(rng, tensors, lambda t: _real(t) and dims <= t.dim() <= 4)
        if x is None:
            return None
        return (x,), parameters(rng, tensors[x], rng.randrange(tensors[x].dim()))

    return choose


def _joined(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
    x = _pick(rng, tensors, lambda t: _real(t) and 1 <= t.dim() <= 3)
    if x is None:
        return None
    alike = [r for r, t in tensors.items() if _real(t) and t.shape == tensors[x].shape]
    return tuple(rng.choices(alike, k=rng.randint(1, 3))), (rng.randrange(tensors[x].dim()),)


def _narrow(rng: random.Random, x: Tensor, dim: int) -> tuple[Any, ...]:
    start = rng.randrange(x.shape[dim])
    return dim, start, rng.randint(1, x.shape[dim] - start)


def _sum(rng: random.Random, x: Tensor, dim: int) -> tuple[Any, ...]:
    dims = sorted({dim, rng.randrange(x.dim())})
    return tuple(dims), rng.random() < 0.5


def _addmm(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
    found = _two(_multiplies)(rng, tensors)
    if found is None:
        return None
    (y, z), _ = found
    shape = torch.Size((tensors[y].shape[0], tensors[z].shape[1]))
    x = _pick(rng, tensors, lambda t: _real(t) and _broadcast(t, torch.empty(shape)) and t.dim() <= 2
              and torch.broadcast_shapes(t.shape, shape) == shape)  # fmt: skip
    return None if x is None else ((x, y, z), ())


def _rows(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
    x = _pick(rng, tensors, lambda t: _real(t) and t.dim() == 2)
    if x is None:
        return None
    # Most nodes can't take a sparse gradient.
    can_be_sparse = tensors[x].is_leaf or tensors[x].grad_fn.name() == "CloneBackward0"  # type: ignore[union-attr]
    rows = [rng.randrange(tensors[x].shape[0]) for _ in range(rng.randint(1, 4))]
    return (x,), (rows, can_be_sparse and rng.random() < 0.7)


def _bag(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
    found = _rows(rng, tensors)
    if found is None:
        return None
    registers, (rows, is_sparse) = found
    starts = sorted({0, rng.randint(0, len(rows))})
    return registers, (rows, starts, is_sparse)


def _scaled(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
    found = _two(_same_shape)(rng, tensors)
    return None if found is None else (found[0], (rng.choice((2, -1)),))


def _with_factor(rng: random.Random, tensors: Mapping[int, Tensor]) -> Choice:
    x = _pick(rng, tensors, _real)
    return None if x is None else ((x,), (rng.choice((2, -1)),))


_sized = _dim(lambda rng, x, dim: (dim,))
_wide = _one(lambda t: _real(t) and t.dim() >= 1)

EXACT: dict[str, Chooser] = {
    "add": _two(_broadcast),
    "sub": _two(_broadcast),
    "mul": _two(_broadcast),
    "matmul": _two(_multiplies),
    "mixed": _two(_multiplies),
    "addmm": _addmm,
    "neg": _one(),
    "relu": _one(),
    "clone": _one(),
    "detach": _one(),
    "double": _one(),
    "square": _one(),
    "sum": _dim(_sum),
    "total": _one(),
    "cumsum": _sized,
    "stack": _joined,
    "cat": _joined,
    "split": _dim(lambda rng, x, dim: (rng.randint(1, x.shape[dim]), dim)),
    "unbind": _sized,
    "largest": _sized,
    "index_select": _dim(lambda rng, x, dim: (dim, [rng.randrange(x.shape[dim]) for _ in range(rng.randint(1, 4))])),
    "transpose": _dim(lambda rng, x, dim: (dim, rng.randrange(x.dim())), 2),
    "narrow": _dim(_narrow),
    "select": _dim(lambda rng, x, dim: (dim, rng.randrange(x.shape[dim]))),
    "reshape": _dim(lambda rng, x, dim: (rng.choice([(-1,), (1, -1), (-1, 1), (x.shape[dim], -1)]),)),
    "flat": _one(),
    "expand": _dim(lambda rng, x, dim: (rng.randint(1, 3),)),
    "flip": _sized,
    "where": _two(_broadcast),
    "single": _one(),
    "to_single": _one(),
    "to_double": _one(lambda t: t.dtype == torch.float32),
    "complex": _two(_same_shape),
    "conj": _one(torch.Tensor.is_complex),
    "parts": _one(torch.Tensor.is_complex),
    "imag": _one(torch.Tensor.is_complex),
    "bag": _bag,
    "embedding": _rows,
    "nothing": _wide,
    "of_nothing": _one(lambda t: t.dtype == torch.float64 and t.numel() == 0),
    "packed": _two(_same_shape),
    "add_": _two(_into),
    "scale_": _with_factor,
    "relu_": _one(),
    "zero_part_": _sized,
    "write_part_": _two(lambda x, y: x.dim() >= 1),
    "fill_": _one(),
    "dirty_": _one(),
    "scaled": _scaled,
    "two": _one(),
    "picky": _two(lambda x, y: True),
    "silent": _two(lambda x, y: True),
    "same": _two(_same_shape),
    "half": _one(),
    "nested": _one(),
}

ROUNDED: dict[str, Chooser] = {**EXACT, "tanh": _one(), "sin": _one(), "mean": _one()}
