"""Gradients in a message. Most are a few small tensors, and the codec has a short way for those if they are simple."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_SMALL = 16 * 1024


def flat(gradients: Sequence[torch.Tensor | None]) -> list[Any]:
    """What to send: a gradient that is there twice (``a + b`` has one for both) is a number the second time."""
    items: list[Any] = []
    places: dict[int, int] = {}
    for place, gradient in enumerate(gradients):
        if gradient is None:
            items.append(None)
            continue
        first = places.setdefault(id(gradient), place)
        if first != place:
            items.append(first)
        elif gradient.layout is torch.strided and not gradient.is_contiguous() and gradient.nbytes <= _SMALL:
            items.append(gradient.contiguous())  # such as what sum() spreads
        else:
            items.append(gradient)
    return items


def restored(items: Sequence[Any]) -> list[torch.Tensor | None]:
    return [items[item] if type(item) is int else item for item in items]
