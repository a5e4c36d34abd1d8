"""Reductions of the same piece of several ranks, in the order of ranks: every rank gets the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed import ReduceOp

from farprop.distributed.reduction import Reduction
from farprop.errors import UsageError

_INTO: dict[Any, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PREMUL_SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def combine(reduction: Reduction, sources: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """``out`` may be the first of the sources, or none of them."""
    _INTO[reduction.kind](sources[0], sources[1], out=out)
    for source in sources[2:]:
        reduction.add(out, source)
    reduction.end(out)


def check_reduction(reduction: Reduction, dtype: torch.dtype) -> None:
    """Before anything is sent: what can't be computed must not break the group."""
    problem = _problem(reduction.kind, dtype)
    if problem:
        raise UsageError(f"Tensors of {dtype} can't be reduced with {reduction.kind}: {problem}")


@cache
def _problem(kind: Any, dtype: torch.dtype) -> str:
    one = torch.ones(1, dtype=dtype)
    try:
        _INTO[kind](one, one, out=one)
        if kind == ReduceOp.AVG:
            Reduction(kind, 1).end(one)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return ""
