"""What torch passes to collectives. Most have several forms: with options, or with the few that matter, one by one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ReduceOp

from farprop.errors import UsageError


def as_list(tensors: Any) -> list[torch.Tensor]:
    """One tensor, or a list of them, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(lists: Any, tensors: Any) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """A list for each tensor, and the tensors; or one list, and one tensor."""
    if isinstance(tensors, torch.Tensor):
        return [list(lists)], [tensors]
    return [list(one) for one in lists], list(tensors)


def operation(opts: Any) -> Any:
    """The reduction's operation."""
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def root(opts: Any) -> int:
    """The rank of the group that a broadcast and the like are from, or to."""
    return int(getattr(opts, "rootRank", opts or 0))


def time_limit(opts: Any, default: timedelta) -> timedelta:
    """How long the collective may take. Torch says that it was not given by a negative one."""
    given = getattr(opts, "timeout", None)
    return given if isinstance(given, timedelta) and given > timedelta(0) else default


def pieces(tensor: torch.Tensor, like: torch.Tensor, size: int) -> list[torch.Tensor]:
    """The part of each rank in a tensor that is those of all ranks, one after the other."""
    if tensor.numel() != like.numel() * size:
        raise UsageError(
            f"A tensor of {tensor.numel()} elements can't hold one of {like.numel()} for each of {size} ranks. "
            f"Give one of {like.numel() * size}."
        )
    return [piece.view_as(like) for piece in tensor.view(-1).chunk(size)] if like.numel() else [like] * size


def split(tensor: torch.Tensor, sizes: list[int], size: int) -> list[torch.Tensor]:
    """The part of each rank along the first dimension: of these sizes, or all the same."""
    rows = tensor.size(0)
    if not sizes:
        if rows % size:
            raise UsageError(f"{rows} rows can't be divided among {size} ranks. Give the split sizes.")
        sizes = [rows // size] * size
    if len(sizes) != size or sum(sizes) != rows:
        raise UsageError(f"Split sizes {sizes} don't fit {rows} rows and {size} ranks.")
    return list(tensor.split(sizes))
