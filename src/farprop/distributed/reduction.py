"""The operations of reductions, on tensors of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import torch
from torch.distributed import ReduceOp

from farprop.errors import UsageError

ReduceKind: TypeAlias = ReduceOp.RedOpType
"""The type of the constants ``ReduceOp.SUM`` and so on."""

_IN_PLACE: dict[ReduceKind, Callable[[torch.Tensor, torch.Tensor], object]] = {
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
_OUT_OF_PLACE: dict[ReduceKind, Callable[..., torch.Tensor]] = {
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


class Reduction:
    """A reduction in three parts, all in place.

    ``prescale`` is called on every rank's tensor, ``accumulate`` combines the results in any grouping, and
    ``postscale`` is called once on the total.

    Args:
        kind: one of the constants of ``ReduceOp``.
        factor: what ``prescale`` multiplies by; None for nothing.
        divisor: what ``postscale`` divides by; None for nothing.
    """

    def __init__(
        self, kind: ReduceKind, factor: float | torch.Tensor | None = None, divisor: int | None = None
    ) -> None:
        self.kind = kind
        self._factor = factor
        self._divisor = divisor
        self._in_place = _IN_PLACE[kind]
        self._out_of_place = _OUT_OF_PLACE[kind]

    @classmethod
    def from_op(cls, op: ReduceOp | ReduceKind, size: int) -> Reduction:
        """The reduction of a ``ReduceOp`` among ``size`` ranks.

        Raises:
            UsageError: there is no such operation.
        """
        # A ReduceOp has a kind; the constants ReduceOp.SUM and so on are kinds already.
        kind: Any = getattr(op, "op", op)
        if kind not in _IN_PLACE:
            raise UsageError(f"There is no reduction with {op}. Use one of torch.distributed.ReduceOp.")
        factor = op.factor if kind == ReduceOp.PREMUL_SUM else None  # type: ignore[union-attr]
        return cls(kind, factor, size if kind == ReduceOp.AVG else None)

    def in_two_stages(self) -> tuple[Reduction, Reduction]:
        """The same reduction for totals of totals: the first stage does not postscale, the second does not prescale."""
        return Reduction(self.kind, factor=self._factor), Reduction(self.kind, divisor=self._divisor)

    def prescale(self, tensor: torch.Tensor) -> None:
        if self._factor is not None:
            tensor.mul_(self._factor)

    def copy_prescaled(self, source: torch.Tensor, out: torch.Tensor) -> None:
        """Copy and prescale in one pass over the memory."""
        if self._factor is None:
            out.copy_(source)
        else:
            torch.mul(source, self._factor, out=out)

    def accumulate(self, total: torch.Tensor, other: torch.Tensor) -> None:
        self._in_place(total, other)

    def accumulate_prescaled(self, total: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
        """Prescale ``other`` and accumulate, in one pass over the memory if the factor is a number.

        Args:
            total: what was accumulated so far.
            other: may be overwritten.
            out: where the total goes: one of the two.
        """
        if self._factor is None:
            self._out_of_place(total, other, out=out)
        elif isinstance(self._factor, torch.Tensor):
            self._out_of_place(total, other.mul_(self._factor), out=out)
        else:
            torch.add(total, other, alpha=self._factor, out=out)  # there is a factor for sums only

    def postscale(self, total: torch.Tensor) -> None:
        if self._divisor is None:
            return
        if total.is_floating_point() or total.is_complex():
            total.div_(self._divisor)
        else:
            total.div_(self._divisor, rounding_mode="trunc")

    def combine(self, sources: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Accumulate tensors in their order, and postscale: every rank that does it gets the same bits.

        Args:
            sources: prescaled tensors.
            out: where the total goes. It may be one of the first two sources.
        """
        if len(sources) == 1:
            out.copy_(sources[0])
        else:
            self._out_of_place(sources[0], sources[1], out=out)
        for source in sources[2:]:
            self.accumulate(out, source)
        self.postscale(out)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Called before anything is sent: arguments that can't be computed must not break the group.

        Raises:
            UsageError: tensors of this dtype can't be reduced like this.
        """
        problem = _problem(self.kind, dtype)
        if problem is not None:
            raise UsageError(f"Tensors of {dtype} can't be reduced with {self.kind}: {problem}")


@cache
def _problem(kind: ReduceKind, dtype: torch.dtype) -> str | None:
    """What torch says about this operation on this dtype; None if it can be computed."""
    one = torch.ones(1, dtype=dtype)
    try:
        _OUT_OF_PLACE[kind](one, one, out=one)
        Reduction(kind, divisor=1 if kind == ReduceOp.AVG else None).postscale(one)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
