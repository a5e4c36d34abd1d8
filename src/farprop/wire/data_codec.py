"""The codec of restricted jobs: MessagePack, written and read by msgspec. Messages hold data, never code.

A value is a number, text, bytes, None, or an array whose first element is a tag for the type. Rules that hold here:

- Any bytes decode to a value or raise ``ProtocolError`` (``NotExposedError`` for a name that is not exposed). The
  memory used is proportional to the number of bytes.
- A message can name only functions, classes and dataclasses that this process has exposed.
- A tensor's dtype and shape fit its bytes exactly, and the indices of sparse tensors are checked.
- Large tensors travel as buffers beside the message, as in ``codec``. Both ends collect the tensors that require grad
  in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import msgspec
import torch

from farprop._torch import sparse_indices, sparse_values
from farprop.errors import NotDataError, ProtocolError
from farprop.wire import codec, exposed
from farprop.wire.data_reader import (
    AGAIN,
    ATOMS,
    BYTEARRAY,
    COMPLEX,
    COO,
    CSR,
    DATACLASS,
    DEVICE,
    DICT,
    DTYPE,
    EXPOSED,
    FROZENSET,
    INT,
    LIST,
    MAX_DEPTH,
    MAX_INT_BYTES,
    REFERENCE,
    SET,
    SIZE,
    TENSOR,
    TUPLE,
    Reader,
)
from farprop.wire.data_tensors import WrittenTensors
from farprop.wire.message import FAST, Message
from farprop.wire.tensors import CODES

MAX_META = 256 << 20
_PICKLE = b"\x80"  # the first byte of every pickle, and of no message of ours

_CODE_KINDS = (type, FunctionType, BuiltinFunctionType, MethodType)
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_NO_ARGUMENTS = _encode(())
_NONE = _encode(None)


# Writing


class _Writer:
    """Turns the values of one message into MessagePack's types."""

    __slots__ = ("graph", "out_of_band", "tensors")

    def __init__(self, graph: list[torch.Tensor] | None) -> None:
        if graph is not None:
            graph.clear()  # an earlier try may have filled it
        self.graph = graph
        self.tensors = WrittenTensors()
        self.out_of_band: list[Any] = []

    def write(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind is _Tensor or kind is _Parameter:
            return self._write_tensor(value)
        if kind in ATOMS:
            return value if kind is not int or -(1 << 63) <= value < 1 << 64 else _write_int(value)
        if depth > MAX_DEPTH:
            raise NotDataError(
                f"A value sent in a restricted job may be nested {MAX_DEPTH} deep, and must not contain itself."
            )
        tag = _SEQUENCES.get(kind)
        if tag is not None:
            depth += 1
            return [tag, *[self.write(item, depth) for item in value]]
        if kind is dict:
            depth += 1
            return [DICT, *[self.write(item, depth) for pair in value.items() for item in pair]]
        return self._write_rare(value, kind, depth)

    def _write_rare(self, value: Any, kind: type, depth: int) -> list[Any]:
        if kind is complex:
            return [COMPLEX, value.real, value.imag]
        if kind is bytearray:
            return [BYTEARRAY, bytes(value)]
        if kind is torch.Size:
            return [SIZE, *value]
        if kind is torch.dtype and value in CODES:
            return [DTYPE, CODES[value]]
        if kind is torch.device:
            return [DEVICE, value.type, value.index]
        if kind in codec.reference_kinds:
            return [REFERENCE, self._travel(value)]
        fields = exposed.fields_of(kind)
        if fields is not None:
            flat = [self.write(getattr(value, field), depth + 1) for field in fields]
            return [DATACLASS, exposed.name_of(kind), *fields, *flat]
        if isinstance(value, _CODE_KINDS):
            name = exposed.name_of(value)
            if name is not None:
                return [EXPOSED, name]
        raise _not_data(value)

    def _travel(self, value: Any) -> int:
        for place, known in enumerate(self.out_of_band):
            if known is value:
                return place
        self.out_of_band.append(value)
        return len(self.out_of_band) - 1

    def _write_tensor(self, tensor: torch.Tensor) -> list[Any]:
        tensors = self.tensors
        known = tensors.known(tensor)
        if known is not None:
            return [AGAIN, known]
        requires_grad = tensor.requires_grad
        if requires_grad and self.graph is not None:
            self.graph.append(tensor)
        layout = tensor.layout
        if not tensor.is_cpu:
            raise NotDataError(f"A tensor on {tensor.device} can't be sent in a restricted job. Call .cpu() first.")
        if layout is torch.strided:
            return [TENSOR, *tensors.write(tensor), requires_grad]
        if layout is torch.sparse_coo:
            plain = tensor.detach()
            parts = [[*tensors.write(part), False] for part in (sparse_indices(plain), sparse_values(plain))]
            return [COO, *parts, list(tensor.shape), plain.is_coalesced(), requires_grad]
        if layout is torch.sparse_csr:
            plain = tensor.detach()
            found = plain.crow_indices(), plain.col_indices(), plain.values()
            return [CSR, *[[*tensors.write(part), False] for part in found], list(tensor.shape), requires_grad]
        raise NotDataError(f"A restricted job sends dense, COO and CSR tensors, and this one is {layout}.")

    def encoded(self, whole: Any, flags: int) -> Message:
        try:
            meta = _encode(whole)
        except UnicodeEncodeError as error:
            raise NotDataError(f"Text with half a surrogate pair can't be sent in a restricted job: {error}") from error
        if len(meta) > MAX_META:
            raise NotDataError(
                f"A message of {len(meta)} bytes besides its tensors can't be sent in a restricted job, whose limit is "
                f"{MAX_META}. Send it in parts, or as tensors."
            )
        return Message(meta, self.tensors.buffers, self.tensors.keep, flags, self.out_of_band)


_SEQUENCES: dict[type, int] = {list: LIST, tuple: TUPLE, set: SET, frozenset: FROZENSET}


def _write_int(value: int) -> list[Any]:
    size = value.bit_length() // 8 + 1
    if size > MAX_INT_BYTES:
        raise NotDataError(f"A number of {size} bytes can't be sent in a restricted job: at most {MAX_INT_BYTES}.")
    return [INT, value.to_bytes(size, "little", signed=True)]


def _not_data(value: Any) -> NotDataError:
    kind = type(value)
    return NotDataError(
        f"A {kind.__module__}.{kind.__qualname__} can't be sent in a restricted job, which sends data alone: numbers, "
        "text, bytes, lists, tuples, dicts, sets, tensors, references, and dataclasses with @farprop.rpc.expose. Send "
        "it as one of these, or keep it where it is and send an RRef to it."
    )


def encode_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: list[torch.Tensor] | None = None,
    place: object = None,
) -> Message:
    """Encode the arguments of a call. The function travels by its name."""
    if function is not None:
        raise NotDataError(
            f"{function!r} has no name that other workers could know it by, and a restricted job sends no code. Call a "
            "function of a module, with @farprop.rpc.expose on the worker that is called, or give the name as text."
        )
    if not kwargs:
        if not args:
            return Message(_NO_ARGUMENTS, [], (), FAST)
        if ATOMS.issuperset(map(type, args)):
            try:
                return Message(_encode(args), [], args, FAST)
            except (OverflowError, UnicodeEncodeError):
                pass
        writer = _Writer(graph)
        flat = [writer.write(value) for value in args]
        return writer.encoded(flat, FAST)
    writer = _Writer(graph)
    flat = [writer.write(value) for value in args]
    named = [writer.write(item) for pair in kwargs.items() for item in pair]
    return writer.encoded([flat, named], 0)


def encode_value(value: Any, graph: list[torch.Tensor] | None = None, place: object = None) -> Message:
    """Encode a function's result. Farprop's own functions may return a message that is encoded already."""
    if value is None:
        return Message(_NONE, [])
    if type(value) is Message:
        return value
    writer = _Writer(graph)
    return writer.encoded(writer.write(value), 0)


# Reading


def _unpack(meta: bytes | bytearray | memoryview) -> Any:
    if len(meta) > MAX_META:
        raise ProtocolError(f"a message has {len(meta)} bytes besides its tensors, and the limit is {MAX_META}")
    try:
        return _decode(meta)
    except Exception as error:  # msgspec raises several types
        if bytes(meta[:1]) == _PICKLE:
            raise ProtocolError(
                "A worker of a restricted job received a pickle. It reads data alone, and nothing was unpickled."
            ) from None
        raise ProtocolError(f"a message is not valid MessagePack: {error}") from error


def decode_call(
    meta: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Decode the ``(args, kwargs)`` that ``encode_call`` took."""
    if flags & FAST and meta == _NO_ARGUMENTS:
        return (), {}
    whole = _unpack(meta)
    if type(whole) is not list:
        raise ProtocolError("a message has no arguments")
    if flags & FAST:
        if ATOMS.issuperset(map(type, whole)):
            return whole, {}
        read = Reader(buffers).read
        return [read(item) for item in whole], {}
    if len(whole) != 2 or type(whole[0]) is not list or type(whole[1]) is not list:
        raise ProtocolError("a message has no arguments")
    read = Reader(buffers).read
    args = [read(item) for item in whole[0]]
    names, values = whole[1][::2], [read(item) for item in whole[1][1::2]]
    if len(names) != len(values) or not all(type(name) is str for name in names):
        raise ProtocolError("a message has named arguments without names")
    return args, dict(zip(names, values, strict=True))


def decode_value(meta: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int) -> Any:
    """Decode the value that ``encode_value`` took."""
    whole = _unpack(meta)
    return whole if type(whole) in ATOMS else Reader(buffers).read(whole)


def refuse(*_: Any) -> Any:
    """Stands in for the decoder of pickled functions, which restricted jobs refuse."""
    raise ProtocolError("A restricted job sends functions by their names alone.")
