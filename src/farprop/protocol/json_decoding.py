"""Decodes JSON of other processes by a schema.

Two threads that have msgspec learn the same dataclass at the same moment can crash the process (msgspec 0.22). So a
class is learned under a lock, once.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from farprop.locks import make_lock

_T = TypeVar("_T")

_lock = make_lock("json_decoders")
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


def decode(data: bytes | memoryview | str, kind: type[_T]) -> _T:
    """The object of this kind in the data.

    Raises:
        msgspec.MsgspecError, ValueError, RecursionError: the data makes no sense.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.get(kind)
            if decoder is None:
                decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    decoded: _T = decoder.decode(data)
    return decoded
