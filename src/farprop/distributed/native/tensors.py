"""Tensors of users as the flat ones that collectives move, and as text in fingerprints and errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from farprop.errors import UsageError


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with one dimension, contiguous, without autograd history: its own memory, or a copy."""
    return tensor.detach().contiguous().view(-1)


def flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [flat(tensor) for tensor in tensors]


def copy_back(tensor: torch.Tensor, written: torch.Tensor) -> None:
    """Copy ``written`` into the tensor that it was made from, if it is a copy."""
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
        UsageError: they are not like that.
    """
    if len(parts) != size:
        raise UsageError(f"{name} needs a tensor for each of {size} ranks, and got {len(parts)}.")
    for part in parts:
        check_device(part)
        if part.dtype != dtype:
            raise UsageError(f"{name} got tensors of {dtype} and of {part.dtype}. Give all the same dtype.")
