"""The arguments of collectives: torch's forms of them, checks, and the flat tensors that collectives move.

Torch passes most arguments in two forms: with an options object, or one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch.distributed import ReduceOp

from farprop.errors import UsageError

# Torch's forms


def as_list(tensors: Any) -> list[torch.Tensor]:
    """A list of tensors, from a tensor or a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_lists(lists: Any, tensors: Any) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
    """A list of tensors for each tensor, and the tensors. One list with one tensor is also accepted."""
    if isinstance(tensors, torch.Tensor):
        return [list(lists)], [tensors]
    return [list(one) for one in lists], list(tensors)


def operation(opts: Any) -> ReduceOp | ReduceOp.RedOpType:
    """The operation of a reduction, from options or an operation; None is a sum."""
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


def root(opts: Any) -> int:
    """The root of a broadcast, reduce, gather or scatter, from options or a rank; None is rank 0."""
    return int(getattr(opts, "rootRank", opts or 0))


def time_limit(opts: Any, default: timedelta) -> timedelta:
    """The timeout in the options, or the default. Torch passes a negative one if the user gave none."""
    given = getattr(opts, "timeout", None)
    return given if isinstance(given, timedelta) and given > timedelta(0) else default


# The part of each rank


def pieces(tensor: torch.Tensor, like: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Cut a tensor that holds the tensors of all ranks, one after the other, into views of them.

    Raises:
        UsageError: it does not have the size of ``size`` tensors like ``like``.
    """
    if tensor.numel() != like.numel() * size:
        raise UsageError(
            f"A tensor of {tensor.numel()} elements can't hold one of {like.numel()} for each of {size} ranks. "
            f"Give one of {like.numel() * size} elements."
        )
    return [piece.view_as(like) for piece in tensor.view(-1).chunk(size)] if like.numel() else [like] * size


def split(tensor: torch.Tensor, sizes: list[int], size: int) -> list[torch.Tensor]:
    """Split a tensor along its first dimension, one part for each rank. Without sizes all parts are equal.

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


# Checks


def check_device(tensor: torch.Tensor) -> None:
    """Refuse tensors that are not on the CPU.

    Raises:
        UsageError: it is on another device.
    """
    if tensor.device.type != "cpu":
        raise UsageError(
            f"The backend farprop moves CPU tensors, and this one is on {tensor.device}. Use another backend for that "
            'device, such as init_process_group("cpu:farprop,cuda:nccl"), or move the tensor.'
        )


def check_parts(name: str, parts: Sequence[torch.Tensor], size: int, dtype: torch.dtype) -> None:
    """Check that there is a CPU tensor for each rank, all of one dtype.

    Raises:
        UsageError: the number of tensors, a device or a dtype is wrong.
    """
    if len(parts) != size:
        raise UsageError(f"{name} needs a tensor for each of {size} ranks, and got {len(parts)}.")
    for part in parts:
        check_device(part)
        if part.dtype != dtype:
            raise UsageError(f"{name} got tensors of {dtype} and of {part.dtype}. Give all the same dtype.")


# Flat tensors, and tensors as text in fingerprints and errors


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with one dimension, contiguous, without autograd history: its own memory, or a copy."""
    return tensor.detach().contiguous().view(-1)


def flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [flat(tensor) for tensor in tensors]


def copy_back(tensor: torch.Tensor, written: torch.Tensor) -> None:
    """Copy ``written`` back into the tensor that ``flat`` made it from, unless both share their memory."""
    if written.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(written.view(tensor.shape))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def describe(tensor: torch.Tensor) -> str:
    """Layout, dtype and shape, such as ``float32 [4]``."""
    return _describe(tensor.layout, tensor.dtype, tensor.shape)


@lru_cache(1024)
def _describe(layout: torch.layout, dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{'' if layout == torch.strided else 'sparse '}{_name(dtype)} {list(shape)}"


def dtype_name(tensor: torch.Tensor) -> str:
    """The dtype, such as ``float32``."""
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
