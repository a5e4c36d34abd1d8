"""``encode`` and ``decode``: any object to a pickle and large buffers, and back.

Plain pickle first, because it is fast. What it can't name (lambdas, closures, local classes) is encoded
again with cloudpickle. A class that has ``_reduce_for_call(pickler)`` says by it how it travels in calls, and only
there. Objects that it gives to the pickler's ``travel`` travel in front of the pickle, and ``arrival`` finds them.

For a message of an autograd context, ``graph`` takes the tensors that require grad, in the order in which the decoder
builds them.

``place`` says where tensors go that are not on the CPU. Without one they raise ``NotPlaced``.

``class_reducers`` has what the program registered for classes of its own, and comes before everything else.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch

from farprop import _torch
from farprop.wire.frames import PLAIN
from farprop.wire.plain import ATOMS, decode_plain, encode_plain
from farprop.wire.tensors import (
    INLINE_LIMIT,
    NotPlaced,
    Place,
    Sent,
    SpanTooShort,
    collecting,
    placed,
    reduce_tensor,
    requiring_grad,
)

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_Pickler = pickle.Pickler
_loads = pickle.loads
_SHORT = ATOMS | {torch.Tensor}
_MAX_PLAIN = 8
_R = TypeVar("_R")

# ``reducer(obj)`` for objects of exactly this class returns what ``__reduce__`` would.
class_reducers: dict[Any, Callable[[Any], Any]] = {}


# Classes whose objects travel in front of a message, and what finds the one at a place there when it is decoded.
reference_kinds: dict[type, Callable[[int], Any]] = {}


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


class _Writing(threading.local):
    """The pickler that this thread is in, while a reducer of the program runs."""

    pickler: _Reductions | None = None


class _Reductions:
    """What both picklers do with tensors and script modules. State is for one message."""

    sent: dict[int, Sent] | None = None
    whole: frozenset[int] | None = None
    travellers: list[Any] | tuple[()] = ()
    graph: list[torch.Tensor] | None = None

    def travel(self, obj: Any) -> int:
        """Have ``obj`` travel in front of the pickle; its place there."""
        if isinstance(self.travellers, tuple):
            self.travellers = []
        self.travellers.append(obj)
        return len(self.travellers) - 1

    def reduce(self, obj: Any) -> Any:
        if class_reducers and type(obj) in class_reducers:
            outer, _writing.pickler = _writing.pickler, self
            try:
                return class_reducers[type(obj)](obj)
            finally:
                _writing.pickler = outer
        if type(obj) is _Tensor:
            sent = self.sent
            if sent is None:
                sent = self.sent = {}
            if obj.requires_grad:
                if self.graph is not None:
                    self.graph.append(obj)
                # Torch's own way for the rarer layouts does not say that they require grad.
                return reduce_tensor(obj, sent, self.whole) or (requiring_grad, (obj.detach(),))
            reduced = reduce_tensor(obj, sent, self.whole)
            return NotImplemented if reduced is None else reduced
        if isinstance(obj, _Tensor):
            if not obj.is_cpu and type(obj) is not _Parameter and not obj.is_meta:
                raise NotPlaced.on(obj.device)
            if self.graph is not None and obj.requires_grad:
                # A parameter, or another subclass: there it is what a call computed, and no leaf.
                self.graph.append(obj)
                return requiring_grad, (obj.detach(),)
        if isinstance(obj, _torch.ScriptModule):
            return _load_script_module, (_save_script_module(obj),)
        if isinstance(obj, _torch.ScriptMethod):
            return getattr, (_torch.wrap_module(obj.owner), obj.name)
        if isinstance(obj, _torch.ScriptList):
            return list, (list(obj),)
        if isinstance(obj, _torch.ScriptDict):
            return dict, (dict(obj.items()),)
        for_call = getattr(type(obj), "_reduce_for_call", None)
        if for_call is not None:
            return for_call(obj, self)
        return NotImplemented


class _Placements(_Reductions):
    """The same with a ``Place``. What is moved travels as a copy on the CPU."""

    place: Place
    copies: dict[int, torch.Tensor] | None = None

    def reduce(self, obj: Any) -> Any:
        # A parameter is asked for its data, which comes here, and stays a parameter.
        if not isinstance(obj, _Tensor) or type(obj) is _Parameter or obj.is_meta or type(obj) in class_reducers:
            return super().reduce(obj)
        if self.copies is None:
            self.copies = {}
        elif id(obj) in self.copies:
            return super().reduce(obj)
        target = self.place(obj.device)
        if obj.is_cpu and target == "cpu":
            return super().reduce(obj)
        if obj.requires_grad and self.graph is not None:
            self.graph.append(obj)
        # On the current stream of the tensor's device, and waits for it: what was computed there is in the copy.
        copy = obj.detach().cpu()
        self.copies[id(copy)] = copy
        return placed, (copy, target, obj.requires_grad)


class _Tabled(_Reductions):
    """The same with a table of reducers, which has the last word on tensors."""

    table: Mapping[Any, Callable[[Any], Any]]

    def reduce(self, obj: Any) -> Any:
        reducer = self.table.get(type(obj))
        if reducer is not None:
            return reducer(obj)
        return NotImplemented if type(obj) is _Tensor else super().reduce(obj)


class _FastPickler(_Reductions, _Pickler):
    reducer_override = _Reductions.reduce


class _PlacingPickler(_Placements, _Pickler):
    reducer_override = _Placements.reduce


class _TabledPickler(_Tabled, _Pickler):
    reducer_override = _Tabled.reduce


_writing = _Writing()


def encode(obj: Any, graph: list[torch.Tensor] | None = None, place: Place | None = None) -> Encoded:
    """Encode ``obj``. What its ``__reduce__`` and the like raise comes out as it is."""
    try:
        return _encode(_FastPickler if place is None else _PlacingPickler, obj, graph, place)
    except (pickle.PicklingError, AttributeError):
        # No importable name. cloudpickle is imported only now: most programs never need it.
        try:
            return _encode(_cloud_pickler(place), obj, graph, place)
        except pickle.PicklingError as error:
            raise TypeError(f"can't send {type(obj).__name__}: {error}") from error


def encode_with(reducers: Mapping[Any, Callable[[Any], Any]], obj: Any, begin: Callable[[], None]) -> bytes:
    """A pickle of ``obj`` alone, by a table of reducers. ``begin`` is called first, and again for a second try."""
    begin()
    try:
        return _dumped(_TabledPickler, reducers, obj)
    except (pickle.PicklingError, AttributeError):
        begin()
        _cloud_pickler(None)
        return _dumped(_TabledCloudPickler, reducers, obj)


def _dumped(pickler_type: Any, reducers: Mapping[Any, Callable[[Any], Any]], obj: Any) -> bytes:
    file = io.BytesIO()
    pickler = pickler_type(file, 5)
    pickler.table = reducers
    pickler.dump(obj)
    return file.getvalue()


def travel_along(obj: Any) -> int | None:
    """Inside a reducer of the program: have ``obj`` travel in front of the pickle. None where no call is encoded."""
    return None if _writing.pickler is None else _writing.pickler.travel(obj)


def encode_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: list[torch.Tensor] | None = None,
    place: Place | None = None,
) -> Encoded:
    """Encode a call: ``(args, kwargs)``, or ``(function, args, kwargs)`` where the function has no name to go by."""
    if function is not None:
        return encode((function, args, kwargs), graph, place)
    if not kwargs and place is None and len(args) <= _MAX_PLAIN and _Tensor not in class_reducers:
        plain = encode_plain(args)
        if plain is not None:
            if graph is not None:
                graph.extend([value for value in args if type(value) is _Tensor and value.requires_grad])
            return Encoded(plain[0], plain[1], args, PLAIN)
    return encode((args, kwargs), graph, place)


def decode_call(
    meta: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The ``(args, kwargs)`` that ``encode_call`` took, of a function that goes by its name."""
    if flags & PLAIN:
        return decode_plain(meta, buffers), {}
    return _loads(meta, buffers=buffers)  # type: ignore[no-any-return]


def encode_value(value: Any, graph: list[torch.Tensor] | None = None, place: Place | None = None) -> Encoded:
    """Encode what a function returned. Functions of farprop's own may return what they have encoded."""
    if value is None:
        return _NONE
    if type(value) is Encoded:
        return value
    if type(value) in _SHORT and place is None and _Tensor not in class_reducers:
        plain = encode_plain((value,))
        if plain is not None:
            if graph is not None and type(value) is _Tensor and value.requires_grad:
                graph.append(value)
            return Encoded(plain[0], plain[1], value, PLAIN)
    return encode(value, graph, place)


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


def decode_collecting(decoder: Callable[..., _R], *args: Any) -> tuple[_R, list[torch.Tensor]]:
    """Call one of the decoders; what it returns, and the tensors in it that required grad, which are no leaves yet."""
    outer, collecting.tensors = collecting.tensors, []
    try:
        return decoder(*args), collecting.tensors
    finally:
        collecting.tensors = outer


def _encode(
    pickler_type: Any,
    obj: Any,
    graph: list[torch.Tensor] | None,
    place: Place | None,
    whole: frozenset[int] | None = None,
) -> Encoded:
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
    if graph is not None:
        graph.clear()  # of a try that failed
        pickler.graph = graph
    if place is not None:
        pickler.place = place
    try:
        pickler.dump(obj)
    except SpanTooShort as short:
        return _encode(pickler_type, obj, graph, place, (whole or frozenset()) | {short.storage})
    if not large:
        return Encoded(file.getvalue(), [], None, 0, pickler.travellers)
    return Encoded(file.getvalue(), [b.raw() for b in large], (pickler.sent, large), 0, pickler.travellers)


def _cloud_pickler(place: Place | None) -> Any:
    global _CloudPickler, _PlacingCloudPickler, _TabledCloudPickler
    if _CloudPickler is None:
        import cloudpickle

        class CloudPickler(_Reductions, cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, obj: Any) -> Any:
                reduced = self.reduce(obj)
                if reduced is NotImplemented and type(obj) is MethodType and isinstance(obj.__self__, type):
                    # cloudpickle would send the code of a class method with all that it refers to.
                    return getattr, (obj.__self__, obj.__name__)
                return super().reducer_override(obj) if reduced is NotImplemented else reduced

        _CloudPickler = CloudPickler
        _PlacingCloudPickler = type("PlacingCloudPickler", (_Placements, CloudPickler), {})
        _TabledCloudPickler = type("TabledCloudPickler", (_Tabled, CloudPickler), {})
    return _CloudPickler if place is None else _PlacingCloudPickler


_CloudPickler: Any = None
_PlacingCloudPickler: Any = None
_TabledCloudPickler: Any = None
_NONE = Encoded(pickle.dumps((0, (None,)), 5), [], None, PLAIN)


def _save_script_module(module: Any) -> bytes:
    file = io.BytesIO()
    _torch.save_script(module, file)
    return file.getvalue()


def _load_script_module(data: bytes) -> Any:
    return _torch.load_script(io.BytesIO(data))
