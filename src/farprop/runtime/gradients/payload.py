"""Gradients in a message. Most are a few small tensors, and the codec has a short way for those if they are simple.

A gradient that is not on the CPU travels as a copy on the CPU, and goes on where the tensor is that it belongs to. That
is where the inverse of the device map would take it; the send remembers it, so no map is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farprop.errors import ProtocolError
from farprop.wire.codec import Encoded
from farprop.wire.dialect import Dialect
from farprop.wire.tensors import NotPlaced

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
    return [_earlier(items, place) if type(item) is int else item for place, item in enumerate(items)]


def _earlier(items: Sequence[Any], place: int) -> torch.Tensor:
    first = items[place]
    found = items[first] if 0 <= first < place else None
    if not isinstance(found, torch.Tensor):
        raise ProtocolError("a message of a backward pass refers to a gradient that it does not have")
    return found


def encode_gradients(dialect: Dialect, message: tuple[Any, ...]) -> Encoded:
    """Encode a message that has gradients among other things."""
    try:
        return dialect.encode_call(None, message, {})
    except NotPlaced:
        on_cpu = [item.cpu() if isinstance(item, torch.Tensor) else item for item in message]
        return dialect.encode_call(None, tuple(on_cpu), {})


def moved(gradients: Sequence[torch.Tensor | None], devices: Sequence[torch.device]) -> list[torch.Tensor | None]:
    """The gradients on the devices of their tensors."""
    pairs = zip(gradients, devices, strict=True)
    return [None if gradient is None else gradient.to(device) for gradient, device in pairs]
