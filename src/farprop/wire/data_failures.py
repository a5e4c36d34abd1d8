"""Exceptions in the answers of restricted jobs: the type's name and the text.

The caller raises the exception as its own type if the type is built into Python or defined by farprop; a table holds
these. Tracebacks don't travel, because they would show code and paths to a worker that may belong to somebody else.
"""

from __future__ import annotations

import builtins
from typing import Any

import msgspec

from farprop import errors
from farprop.errors import ProtocolError, RemoteError
from farprop.wire.message import Message

_MAX_TEXT = 64 * 1024
_MAX_NOTES = 8
# Raised inside a generator, these would end it.
_NOT_THESE = (StopIteration, StopAsyncIteration)
_KINDS: dict[str, type[Exception]] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for module in (builtins, errors)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and kind not in _NOT_THESE
}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[str, str, list[str], str]).decode


def encode_failure(error: BaseException, worker: str) -> Message:
    kind = type(error)
    notes = [_clean(str(note)) for note in getattr(error, "__notes__", ())][:_MAX_NOTES]
    return Message(_encode((f"{kind.__module__}.{kind.__qualname__}", _text(error), notes, worker)), [], None)


def _text(error: BaseException) -> str:
    try:
        one = error.args[0] if len(error.args) == 1 else None
        return _clean(one if isinstance(one, str) else str(error))  # ``str`` of a KeyError is a repr
    except Exception as failure:
        return f"<it can't be shown: {type(failure).__name__}>"


def _clean(text: str) -> str:
    """Replace what MessagePack can't encode, and cut off long texts."""
    return text[:_MAX_TEXT].encode(errors="replace").decode()


def decode_failure(meta: Any) -> Exception:
    """The exception to raise at the caller."""
    try:
        type_name, text, notes, worker = _decode(meta)
    except Exception as error:  # msgspec raises several types
        return ProtocolError(f"a worker answered with a malformed failure: {error}")
    worker = worker[:200]
    try:
        made = _KINDS[type_name](text)
    except (KeyError, TypeError):
        made = RemoteError(
            f"{type_name[:200]} was raised on {worker}: {text}\n(In a restricted job, exceptions that are neither "
            "Python's nor farprop's own come as their text.)",
            worker,
            type_name,
        )
    for note in notes[:_MAX_NOTES]:
        made.add_note(note)
    made.add_note(f"Raised on {worker} by the function that was called there. Its log has the traceback.")
    return made
