"""What ranks send each other: a header of fixed size, a text, and the bytes of a tensor."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import torch

from farprop.errors import ProtocolError

HEADER = struct.Struct("<BxHxxxxqQ")
MAX_TEXT = 4096
BEAT = b"\0"  # between two frames, whose first byte it can't be; it means nothing


class Kind(IntEnum):
    MESSAGE = 1
    """Of ``send``; the key is the tag, the text the dtype."""
    PART = 2
    """Of a collective; the key is its number, the text its statement."""
    STATED = 3
    """What the sender waits in; number and statement, as for a part."""
    BROKEN = 4
    """The group is broken; the text says why."""
    GOODBYE = 5
    """Nothing comes after it."""


def pack(kind: Kind, key: int, text: str, length: int) -> bytes:
    encoded = text.encode()[:MAX_TEXT]
    return HEADER.pack(kind, len(encoded), key, length) + encoded


def unpack(header: bytes | bytearray, max_length: int) -> tuple[Kind, int, int, int]:
    """The kind, the length of the text, the key, and the length of what follows."""
    kind, text, key, length = HEADER.unpack(header)
    if kind not in Kind._value2member_map_ or text > MAX_TEXT or length > max_length:
        raise ProtocolError(f"a header says kind {kind}, {text} characters and {length} bytes")
    return Kind(kind), text, key, length


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
