"""Which tensors share memory, and can't be changed alone."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def memory(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else 0


def is_dense(tensor: Tensor) -> bool:
    """Whether each element has memory of its own."""
    return tensor.numel() > 0 and not any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def entangled(values: list[Any]) -> set[int]:
    """The places in a message of what can't be changed alone at its other end."""
    places = [memory(value) for value in values]
    return {
        i for i, v in enumerate(values) if isinstance(v, Tensor) and (places.count(places[i]) > 1 or not is_dense(v))
    }
