"""``encode`` and ``decode``: any object to a pickle and large buffers, and back.

Plain pickle first, because it is fast. What it can't name (lambdas, closures, local classes) is encoded
again with cloudpickle. A class that has ``_reduce_for_call(pickler)`` says by it how it travels in calls, and only
there. Objects that it gives to the pickler's ``travel`` travel in front of the pickle, and ``arrival`` finds them.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Sequence
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
    """One encoded object: the pickle, the buffers beside it, what keeps their memory alive, flags for its frame, and
    what has to travel in front of it.
    """

    __slots__ = ("buffers", "flags", "keep", "meta", "travellers")

    def __init__(
        self, meta: bytes, buffers: list[memoryview], keep: Any, flags: int = 0, travellers: Sequence[Any] = ()
    ) -> None:
        self.meta = meta
        self.buffers = buffers
        self.keep = keep
        self.flags = flags
        self.travellers = travellers


class _Reductions:
    """What both picklers do with tensors and script modules. State is for one message."""

    sent: dict[int, Sent] | None = None
    whole: frozenset[int] | None = None
    travellers: list[Any] | tuple[()] = ()

    def travel(self, obj: Any) -> int:
        """Have ``obj`` travel in front of the pickle; its place there."""
        if isinstance(self.travellers, tuple):
            self.travellers = []
        self.travellers.append(obj)
        return len(self.travellers) - 1

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
        for_call = getattr(type(obj), "_reduce_for_call", None)
        if for_call is not None:
            return for_call(obj, self)
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


class _Arriving(threading.local):
    """What travelled in front of the pickle that this thread decodes."""

    items: Sequence[Any] = ()


_arriving = _Arriving()


def arrival(place: int) -> Any:
    """Called while a pickle is decoded: what travelled at this place in front of it."""
    return _arriving.items[place]


def decode_with(items: Sequence[Any], decoder: Callable[..., Any], *args: Any) -> Any:
    """Call one of the decoders for a pickle that these travelled in front of."""
    outer, _arriving.items = _arriving.items, items
    try:
        return decoder(*args)
    finally:
        _arriving.items = outer


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
        return Encoded(file.getvalue(), [], None, 0, pickler.travellers)
    return Encoded(file.getvalue(), [b.raw() for b in large], (pickler.sent, large), 0, pickler.travellers)


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
