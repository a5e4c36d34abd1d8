"""A function's exception on its way to the caller.

The exception travels as a pickle inside the message's pickle: if its class can't be imported or rebuilt at the
caller, only that is lost, and the text beside it becomes a ``RemoteError``.
"""

from __future__ import annotations

import traceback
from typing import Any

from farprop import _torch
from farprop.errors import RemoteError
from farprop.wire.codec import Encoded, decode, encode


class ScriptError(_torch.ScriptError, RuntimeError):  # type: ignore[misc]
    """What a TorchScript function raised. Torch's own is no ``RuntimeError``, but callers over torch's RPC got one."""


def encode_failure(error: BaseException, worker: str) -> Encoded:
    """Everything the caller needs to raise ``error`` there."""
    if type(error) is _torch.ScriptError:
        error = ScriptError(*error.args).with_traceback(error.__traceback__)
    kind = type(error)
    shown, text = _shown(error)
    pickled: bytes | None = None
    # An exit or an interrupt here must not end the caller's process, so it travels as text.
    if isinstance(error, Exception):
        try:
            # The traceback's frames stay here; a note from an earlier hop travels on.
            encoded = encode(error)
            pickled = None if encoded.buffers or encoded.travellers else encoded.meta
        except Exception:
            pickled = None
    return encode((pickled, f"{kind.__module__}.{kind.__qualname__}", shown, text, worker))


def _shown(error: BaseException) -> tuple[str, str]:
    """Its repr and its traceback; an exception of a user's may fail to show itself."""
    try:
        return repr(error), "".join(traceback.format_exception(error))
    except Exception as failure:
        place = "".join(traceback.format_tb(error.__traceback__))
        return f"<{type(error).__qualname__} that can't be shown: {type(failure).__name__}>", place


def decode_failure(meta: Any) -> Exception:
    """The exception to raise at the caller, with the worker's name and the remote traceback as a note."""
    pickled, type_name, shown, text, worker = decode(meta)
    note = f"Raised on {worker} by the function that was called there. Its traceback:\n\n{text}"
    if pickled is not None:
        try:
            error = decode(pickled)
            if isinstance(error, Exception):
                error.add_note(note)
                return error
            why = "it came back as something that is not an exception"
        except Exception as failure:
            why = f"{type(failure).__name__}: {failure}"
    else:
        why = "it can't be pickled"
    return RemoteError(
        f"{type_name} was raised on {worker}, and can't be rebuilt here ({why}). "
        f"Original exception on remote side was {shown}\n\n{text}",
        worker,
        type_name,
        text,
    )
