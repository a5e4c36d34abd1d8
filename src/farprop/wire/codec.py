"""``encode`` and ``decode``: any object to a pickle and large buffers, and back.

Plain pickle first, because it is fast. What it can't name (lambdas, closures, local classes) is encoded
again with cloudpickle.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from farprop.wire.frames import PLAIN
from farprop.wire.plain import ATOMS, decode_plain, encode_plain
from farprop.wire.tensors import INLINE_LIMIT, Sent, SpanTooShort, reduce_tensor

_Tensor = torch.Tensor
_Pickler = pickle.Pickler
_loads = pickle.loads
_SHORT = ATOMS | {torch.Tensor}
_MAX_PLAIN = 8


class Encoded:
    """One encoded object: the pickle, the buffers beside it, what keeps their memory alive, and flags for its frame."""

    __slots__ = ("buffers", "flags", "keep", "meta")

    def __init__(self, meta: bytes, buffers: list[memoryview], keep: Any, flags: int = 0) -> None:
        self.meta = meta
        self.buffers = buffers
        self.keep = keep
        self.flags = flags


class _Reductions:
    """What both picklers do with tensors and script modules. State is for one message."""

    sent: dict[int, Sent] | None = None
    whole: frozenset[int] | None = None

    def reduce(self, obj: Any) -> Any:
        if type(obj) is _Tensor:
            sent = self.sent
            if sent is None:
                sent = self.sent = {}
            reduced = reduce_tensor(obj, sent, self.whole)
            return NotImplemented if reduced is None else reduced
        if isinstance(obj, torch.jit.ScriptModule):
            return _load_script_module, (_save_script_module(obj),)
        if isinstance(obj, torch._C.ScriptMethod):
            return getattr, (torch.jit._recursive.wrap_cpp_module(obj.owner), obj.name)
        return NotImplemented


class _FastPickler(_Reductions, _Pickler):
    reducer_override = _Reductions.reduce


def encode(obj: Any) -> Encoded:
    """Encode ``obj``. What its ``__reduce__`` and the like raise comes out as it is."""
    try:
        return _encode(_FastPickler, obj)
    except (pickle.PicklingError, AttributeError):
        # No importable name. cloudpickle is imported only now: most programs never need it.
        try:
            return _encode(_cloud_pickler(), obj)
        except pickle.PicklingError as error:
            raise TypeError(f"can't send {type(obj).__name__}: {error}") from error


def encode_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Encoded:
    """Encode a call: ``(args, kwargs)``, or ``(function, args, kwargs)`` where the function has no name to go by."""
    if function is not None:
        return encode((function, args, kwargs))
    if not kwargs and len(args) <= _MAX_PLAIN:
        plain = encode_plain(args)
        if plain is not None:
            return Encoded(plain[0], plain[1], args, PLAIN)
    return encode((args, kwargs))


def decode_call(
    meta: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The ``(args, kwargs)`` that ``encode_call`` took, of a function that goes by its name."""
    if flags & PLAIN:
        return decode_plain(meta, buffers), {}
    return _loads(meta, buffers=buffers)  # type: ignore[no-any-return]


def encode_value(value: Any) -> Encoded:
    """Encode what a function returned."""
    if value is None:
        return _NONE
    if type(value) in _SHORT:
        plain = encode_plain((value,))
        if plain is not None:
            return Encoded(plain[0], plain[1], value, PLAIN)
    return encode(value)


def decode_value(meta: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int) -> Any:
    if flags & PLAIN:
        return None if meta == _NONE.meta else decode_plain(meta, buffers)[0]
    return _loads(meta, buffers=buffers)


def decode(meta: bytes | bytearray | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Rebuild what ``encode`` took. ``buffers`` are writable and belong to the result from now on."""
    return _loads(meta, buffers=buffers)


def _encode(pickler_type: Any, obj: Any, whole: frozenset[int] | None = None) -> Encoded:
    file = io.BytesIO()
    large: list[pickle.PickleBuffer] = []

    def keep_out_of_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < INLINE_LIMIT:
            return True
        large.append(buffer)
        return False

    pickler = pickler_type(file, 5, buffer_callback=keep_out_of_band)
    if whole is not None:
        pickler.whole = whole
    try:
        pickler.dump(obj)
    except SpanTooShort as short:
        return _encode(pickler_type, obj, (whole or frozenset()) | {short.storage})
    if not large:
        return Encoded(file.getvalue(), [], None)
    return Encoded(file.getvalue(), [b.raw() for b in large], (pickler.sent, large))


def _cloud_pickler() -> Any:
    global _CloudPickler
    if _CloudPickler is None:
        import cloudpickle

        class CloudPickler(_Reductions, cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, obj: Any) -> Any:
                reduced = self.reduce(obj)
                return super().reducer_override(obj) if reduced is NotImplemented else reduced

        _CloudPickler = CloudPickler
    return _CloudPickler


_CloudPickler: Any = None
_NONE = Encoded(pickle.dumps((0, (None,)), 5), [], None, PLAIN)


def _save_script_module(module: Any) -> bytes:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return file.getvalue()


def _load_script_module(data: bytes) -> Any:
    return torch.jit.load(io.BytesIO(data))
