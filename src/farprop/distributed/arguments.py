"""What torch passes to collectives. Most have two forms: with an options object, or with single arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from farprop.errors import UsageError


def as_list(tensors: Any) -> list[torch.Tensor]:
    """A list of tensors, from a tensor or a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(lists: Any, tensors: Any) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """A list of tensors for each tensor, and the tensors; from the same, or from one list and one tensor."""
    if isinstance(tensors, torch.Tensor):
        return [list(lists)], [tensors]
    return [list(one) for one in lists], list(tensors)


def operation(opts: Any) -> Any:
    """The operation of a reduction, from options, an operation, or None for a sum."""
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def root(opts: Any) -> int:
    """The root of a broadcast, reduce, gather or scatter, from options, a rank, or None for rank 0."""
    return int(getattr(opts, "rootRank", opts or 0))


def time_limit(opts: Any, default: timedelta) -> timedelta:
    """The timeout in the options, or the default. Torch passes a negative one if the user gave none."""
    given = getattr(opts, "timeout", None)
    return given if isinstance(given, timedelta) and given > timedelta(0) else default


def pieces(tensor: torch.Tensor, like: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Views of a tensor that holds the tensors of all ranks one after the other.

    Raises:
        UsageError: its size is not that of ``size`` tensors like ``like``.
    """
    if tensor.numel() != like.numel() * size:
        raise UsageError(
            f"A tensor of {tensor.numel()} elements can't hold one of {like.numel()} for each of {size} ranks. "
            f"Give one of {like.numel() * size}."
        )
    return [piece.view_as(like) for piece in tensor.view(-1).chunk(size)] if like.numel() else [like] * size


def split(tensor: torch.Tensor, sizes: list[int], size: int) -> list[torch.Tensor]:
    """The part of each rank along the first dimension: of these sizes, or all equal without sizes.

    Raises:
        UsageError: the sizes don't add up, or the rows can't be divided evenly.
    """
    rows = tensor.size(0)
    if not sizes:
        if rows % size:
            raise UsageError(f"{rows} rows can't be divided among {size} ranks. Give the split sizes.")
        sizes = [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise UsageError(f"Split sizes {sizes} don't fit {rows} rows and {size} ranks.")
    return list(tensor.split(sizes))
