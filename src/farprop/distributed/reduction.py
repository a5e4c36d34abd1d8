"""The operations of reductions, on tensors of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import ReduceOp

from farprop.errors import UsageError

_IN_PLACE: dict[Any, Callable[[torch.Tensor, torch.Tensor], object]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PREMUL_SUM: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda total, other: torch.minimum(total, other, out=total),
    ReduceOp.MAX: lambda total, other: torch.maximum(total, other, out=total),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


class Reduction:
    """One operation: ``begin`` on every rank's tensor, ``add`` them up in any grouping, ``end`` once. All in place."""

    def __init__(self, op: Any, size: int) -> None:
        # A ReduceOp has a kind; the constants ReduceOp.SUM and so on are kinds already.
        self.kind = getattr(op, "op", op)
        if self.kind not in _IN_PLACE:
            raise UsageError(f"Reductions with {op} are not known. Use one of torch.distributed.ReduceOp.")
        self._factor = op.factor if self.kind == ReduceOp.PREMUL_SUM else None
        self._size = size
        self._add = _IN_PLACE[self.kind]

    def begin(self, tensor: torch.Tensor) -> None:
        if self._factor is not None:
            tensor.mul_(self._factor)

    def add(self, total: torch.Tensor, other: torch.Tensor) -> None:
        self._add(total, other)

    def end(self, total: torch.Tensor) -> None:
        if self.kind == ReduceOp.AVG:
            if total.is_floating_point() or total.is_complex():
                total.div_(self._size)
            else:
                total.div_(self._size, rounding_mode="trunc")
