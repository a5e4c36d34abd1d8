"""Tensors of users as the flat ones that collectives move, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from farprop.errors import UsageError


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """One dimension, contiguous, without history: the tensor's own memory, or a copy."""
    return tensor.detach().contiguous().view(-1)


def flats(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [flat(tensor) for tensor in tensors]


def put_back(tensor: torch.Tensor, written: torch.Tensor) -> None:
    """If what was written was a copy, the tensor gets it now."""
    if written.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(written.view(tensor.shape))


def in_words(tensor: torch.Tensor) -> str:
    return _in_words(tensor.layout, tensor.dtype, tensor.shape)


@lru_cache(1024)
def _in_words(layout: torch.layout, dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{'' if layout == torch.strided else 'sparse '}{_name(dtype)} {list(shape)}"


def dtype_name(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise UsageError(
            f"The backend farprop moves CPU tensors, and this one is on {tensor.device}. Use another backend for that "
            'device, such as init_process_group("cpu:farprop,cuda:nccl"), or move the tensor.'
        )


def check_parts(name: str, parts: Sequence[torch.Tensor], size: int, dtype: torch.dtype) -> None:
    """A tensor for each rank, of one type."""
    if len(parts) != size:
        raise UsageError(f"{name} needs a tensor for each of {size} ranks, and got {len(parts)}.")
    for part in parts:
        check(part)
        if part.dtype != dtype:
            raise UsageError(f"{name} got tensors of {dtype} and of {part.dtype}. Give all the same dtype.")
