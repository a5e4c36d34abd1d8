"""Exceptions of functions in the answers to their callers.

The exception travels as a pickle inside the message's pickle. If the caller can't import or rebuild its class, the
caller raises a ``RemoteError`` with the text that travels beside it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

from farprop import _torch
from farprop.errors import RemoteError
from farprop.wire.codec import decode, encode
from farprop.wire.message import Message


class RemoteFailure(NamedTuple):
    """The payload of a failure: the pickled exception, if it can be pickled, and its text."""

    pickled: bytes | None
    type_name: str
    shown: str
    traceback: str
    worker: str


class ScriptError(_torch.ScriptError, RuntimeError):  # type: ignore[misc]
    """The exception of a TorchScript function. Torch's own is no ``RuntimeError``, but its RPC raises one."""


def encode_failure(error: BaseException, worker: str, encode: Callable[[Any], Message] = encode) -> Message:
    """Encode an exception so that the caller can raise it. ``worker`` is the name of this worker."""
    if type(error) is _torch.ScriptError:
        error = ScriptError(*error.args).with_traceback(error.__traceback__)
    kind = type(error)
    shown, text = _shown(error)
    pickled: bytes | None = None
    # An exit or an interrupt here must not end the caller's process, so it travels as text.
    if isinstance(error, Exception):
        try:
            # The traceback's frames don't travel. Notes do, so one from an earlier hop is kept.
            encoded = encode(error)
            pickled = None if encoded.buffers or encoded.out_of_band else bytes(encoded.payload)
        except Exception:
            pickled = None
    failure = RemoteFailure(pickled, f"{kind.__module__}.{kind.__qualname__}", shown, text, worker)
    return encode(tuple(failure))


def _shown(error: BaseException) -> tuple[str, str]:
    """The exception's repr and traceback. A user's exception may raise in its ``__repr__``."""
    try:
        return repr(error), "".join(traceback.format_exception(error))
    except Exception as failure:
        place = "".join(traceback.format_tb(error.__traceback__))
        return f"<{type(error).__qualname__} that can't be shown: {type(failure).__name__}>", place


def decode_failure(payload: bytes | bytearray | memoryview) -> Exception:
    """The exception to raise at the caller, with the worker's name and the remote traceback as a note."""
    failure = RemoteFailure(*decode(payload))
    type_name, text, worker = failure.type_name, failure.traceback, failure.worker
    note = f"Raised on {worker} by the function that was called there. Its traceback:\n\n{text}"
    if failure.pickled is not None:
        try:
            error = decode(failure.pickled)
            if isinstance(error, Exception):
                error.add_note(note)
                return error
            why = "its pickle holds something that is not an exception"
        except Exception as lost:
            why = f"{type(lost).__name__}: {lost}"
    else:
        why = "it can't be pickled"
    return RemoteError(
        f"{type_name} was raised on {worker}, and can't be rebuilt here ({why}). "
        f"Original exception on remote side was {failure.shown}\n\n{text}",
        worker,
        type_name,
        text,
    )


def operator_error(function: Any, args: Any, kwargs: Any) -> Exception | None:
    """The error of an operator's schema. From Python operators raise TypeError, but torch's RPC reports this error."""
    qualified = _torch.find_builtin(function)
    if qualified is None:
        return None
    try:
        _torch.get_operation(qualified)[0](*args, **kwargs)
    except Exception as error:
        return error
    return None
