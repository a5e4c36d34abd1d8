"""``encode`` and ``decode``: any object to a pickle and large buffers, and back.

``encode`` tries plain pickle first, because it is fast. Objects without an importable name (lambdas, closures, local
classes) are encoded again with cloudpickle. A class can define ``_reduce_for_call(pickler)`` to be pickled differently
in calls. It may pass objects to the pickler's ``send_out_of_band``: these travel in front of the pickle, and
``resolve_out_of_band`` finds them in the decoder.

In a message of an autograd context, ``graph`` collects the tensors that require grad, in the order in which the decoder
builds them. Without one, a tensor whose graph stays behind gives the message the flag ``CUT``.

``place`` maps a tensor's device to a device of the receiver. Without it, a tensor that is not on the CPU raises
``DeviceMapRequired``.

``class_reducers`` holds the reducers that the program registered for its own classes. They take precedence over all
others.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch

from farprop import _torch
from farprop.wire.message import CUT, Message
from farprop.wire.tensors import (
    INLINE_LIMIT,
    DeviceMapRequired,
    Place,
    Sent,
    SpanTooShort,
    collecting,
    is_cut,
    placed,
    reduce_tensor,
    requiring_grad,
)

_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_Pickler = pickle.Pickler
_loads = pickle.loads
_DEFINED = (FunctionType, type)
_R = TypeVar("_R")

# Class to reducer, for objects of exactly this class. A reducer returns what ``__reduce__`` would.
class_reducers: dict[Any, Callable[[Any], Any]] = {}


# Classes whose objects travel out of band, and the function that returns such an object by its index in the decoder.
reference_kinds: dict[type, Callable[[int], Any]] = {}


class _Writing(threading.local):
    """The pickler that runs on this thread, while it calls a reducer of the program."""

    pickler: _Reductions | None = None


class _Reductions:
    """Reduces tensors, script modules and classes of our own, for both picklers. One instance encodes one message."""

    sent: dict[int, Sent] | None = None
    whole: frozenset[int] | None = None
    out_of_band: list[Any] | tuple[()] = ()
    graph: list[torch.Tensor] | None = None
    is_cut = False

    def send_out_of_band(self, obj: Any) -> int:
        """Send ``obj`` in front of the pickle; returns its index there."""
        if isinstance(self.out_of_band, tuple):
            self.out_of_band = []
        self.out_of_band.append(obj)
        return len(self.out_of_band) - 1

    def reduce(self, obj: Any) -> Any:
        if class_reducers and type(obj) in class_reducers:
            outer, _writing.pickler = _writing.pickler, self
            try:
                return class_reducers[type(obj)](obj)
            finally:
                _writing.pickler = outer
        if type(obj) is OrderedDict and not obj.__dict__:
            # Its own ``__reduce__`` takes many times as long, and a model has twelve for each of its modules.
            return OrderedDict, (), None, None, iter(obj.items())
        if type(obj) is _Tensor:
            sent = self.sent
            if sent is None:
                sent = self.sent = {}
            if obj.requires_grad:
                if self.graph is not None:
                    self.graph.append(obj)
                elif is_cut(obj):
                    self.is_cut = True
                # Torch's own reduction of the rarer layouts loses ``requires_grad``.
                return reduce_tensor(obj, sent, self.whole) or (requiring_grad, (obj.detach(),))
            reduced = reduce_tensor(obj, sent, self.whole)
            return NotImplemented if reduced is None else reduced
        if isinstance(obj, _Tensor):
            if not obj.is_cpu and type(obj) is not _Parameter and not obj.is_meta:
                raise DeviceMapRequired.on(obj.device)
            if self.graph is not None and obj.requires_grad:
                # A parameter, or another subclass. At the receiver it is the result of a call, not a leaf.
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
    """The same with a ``Place``. Tensors that change their device travel as copies on the CPU."""

    place: Place
    copies: dict[int, torch.Tensor] | None = None

    def reduce(self, obj: Any) -> Any:
        # Torch reduces a parameter to its data, which comes here in turn.
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
        elif obj.requires_grad and is_cut(obj):
            self.is_cut = True
        # The copy runs on the current stream of the tensor's device and waits for it, so it sees all earlier kernels.
        copy = obj.detach().cpu()
        self.copies[id(copy)] = copy
        return placed, (copy, target, obj.requires_grad)


class _Tabled(_Reductions):
    """The same with a table of reducers, which override the ones for tensors."""

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


class _NoMainPickler(_FastPickler):
    """Gives up at functions and classes of ``__main__``, so that cloudpickle sends them by value."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, _DEFINED) and obj.__module__ == "__main__":
            raise pickle.PicklingError
        return self.reduce(obj)


class _NoMainPlacingPickler(_PlacingPickler):
    reducer_override = _NoMainPickler.reducer_override


_writing = _Writing()


def encode(obj: Any, graph: list[torch.Tensor] | None = None, place: Place | None = None) -> Message:
    """Encode an object.

    Args:
        obj: the object. Exceptions of its ``__reduce__`` and the like propagate unchanged.
        graph: collects the tensors that require grad; None outside of an autograd context.
        place: maps devices of this worker to devices of the receiver.

    Returns:
        A message with the payload, the buffers and the objects that travel out of band.

    Raises:
        TypeError: the object can't be pickled.
        DeviceMapRequired: a tensor is not on the CPU, and there is no ``place``.
    """
    try:
        return _encode(_FastPickler if place is None else _PlacingPickler, obj, graph, place)
    except (pickle.PicklingError, AttributeError):
        return _encode_with_cloudpickle(obj, graph, place)


def encode_main_by_value(obj: Any, graph: list[torch.Tensor] | None = None, place: Place | None = None) -> Message:
    """As ``encode``, but functions and classes of ``__main__`` travel by value: the receiver's is another one."""
    try:
        return _encode(_NoMainPickler if place is None else _NoMainPlacingPickler, obj, graph, place)
    except (pickle.PicklingError, AttributeError):
        return _encode_with_cloudpickle(obj, graph, place)


def encode_with(reducers: Mapping[Any, Callable[[Any], Any]], obj: Any, begin: Callable[[], None]) -> bytes:
    """Pickle ``obj`` with a table of reducers. ``begin`` is called before each try: plain pickle's, cloudpickle's."""
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


def send_along(obj: Any) -> int | None:
    """Inside a reducer of the program, send ``obj`` out of band; returns its index, or None if no call is encoded."""
    return None if _writing.pickler is None else _writing.pickler.send_out_of_band(obj)


def decode(meta: bytes | bytearray | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """Rebuild the object that ``encode`` took. ``buffers`` are writable, and the result takes them over."""
    return _loads(meta, buffers=buffers)


class _Decoding(threading.local):
    """The out-of-band objects of the message that this thread decodes."""

    out_of_band: Sequence[Any] = ()


_decoding = _Decoding()


def resolve_out_of_band(place: int) -> Any:
    """Return the out-of-band object at an index. Called while a payload is decoded."""
    return _decoding.out_of_band[place]


def decode_with(
    out_of_band: Sequence[Any], tensors: list[torch.Tensor] | None, decoder: Callable[..., _R], *args: Any
) -> _R:
    """Call a decoder with the out-of-band objects of its message.

    Args:
        out_of_band: the objects that travelled beside the payload.
        tensors: collects the tensors that required grad at the sender, so that the caller can attach them to a graph.
            With None they become leaves that require grad.
        decoder: called with ``args``.
        args: the decoder's arguments.

    Returns:
        The decoder's result.
    """
    outer, _decoding.out_of_band = _decoding.out_of_band, out_of_band
    outer_tensors, collecting.tensors = collecting.tensors, tensors
    try:
        return decoder(*args)
    finally:
        _decoding.out_of_band = outer
        collecting.tensors = outer_tensors


def _encode(
    pickler_type: Any,
    obj: Any,
    graph: list[torch.Tensor] | None,
    place: Place | None,
    whole: frozenset[int] | None = None,
) -> Message:
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
        graph.clear()  # an earlier try may have filled it
        pickler.graph = graph
    if place is not None:
        pickler.place = place
    try:
        pickler.dump(obj)
    except SpanTooShort as short:
        return _encode(pickler_type, obj, graph, place, (whole or frozenset()) | {short.storage})
    flags = CUT if pickler.is_cut else 0
    if not large:
        return Message(file.getvalue(), [], None, flags, pickler.out_of_band)
    return Message(file.getvalue(), [b.raw() for b in large], (pickler.sent, large), flags, pickler.out_of_band)


def _encode_with_cloudpickle(obj: Any, graph: list[torch.Tensor] | None, place: Place | None) -> Message:
    """Encode an object that has no importable name. cloudpickle is imported only now: most programs never need it."""
    try:
        return _encode(_cloud_pickler(place), obj, graph, place)
    except pickle.PicklingError as error:
        raise TypeError(f"can't send {type(obj).__name__}: {error}") from error


def _cloud_pickler(place: Place | None) -> Any:
    global _CloudPickler, _PlacingCloudPickler, _TabledCloudPickler
    if _CloudPickler is None:
        import cloudpickle

        class CloudPickler(_Reductions, cloudpickle.Pickler):  # type: ignore[misc]
            def reducer_override(self, obj: Any) -> Any:
                reduced = self.reduce(obj)
                if reduced is NotImplemented and type(obj) is MethodType and isinstance(obj.__self__, type):
                    # cloudpickle would send the code of a class method with all of its globals.
                    return getattr, (obj.__self__, obj.__name__)
                return super().reducer_override(obj) if reduced is NotImplemented else reduced

        _CloudPickler = CloudPickler
        _PlacingCloudPickler = type("PlacingCloudPickler", (_Placements, CloudPickler), {})
        _TabledCloudPickler = type("TabledCloudPickler", (_Tabled, CloudPickler), {})
    return _CloudPickler if place is None else _PlacingCloudPickler


_CloudPickler: Any = None
_PlacingCloudPickler: Any = None
_TabledCloudPickler: Any = None


def _save_script_module(module: Any) -> bytes:
    file = io.BytesIO()
    _torch.save_script(module, file)
    return file.getvalue()


def _load_script_module(data: bytes) -> Any:
    return _torch.load_script(io.BytesIO(data))
