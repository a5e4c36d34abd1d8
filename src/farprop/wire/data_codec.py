"""Messages of a restricted job: data, and nothing that runs. MessagePack, read and written by msgspec.

A value is a number, text, bytes, None, or an array whose first element says what it stands for. Rules that hold here:

- Whatever bytes come in, the outcome is a value or ``ProtocolError`` (``NotExposedError`` for a name that is not
  exposed), within memory in proportion to the bytes.
- Only functions, classes and dataclasses that this process has exposed are found, by their names.
- A tensor's dtype and shape fit its bytes exactly; the indices of a sparse one are checked.
- Large tensors are buffers beside the message, as in ``codec``, and tensors that require grad are noted in the same
  order at both ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import msgspec
import torch

from farprop._torch import sparse_indices, sparse_values
from farprop.errors import NotDataError, NotExposedError, ProtocolError
from farprop.wire import codec, exposed
from farprop.wire.codec import Encoded
from farprop.wire.data_tensors import WrittenTensors, read_coo, read_csr, read_dense
from farprop.wire.frames import PLAIN
from farprop.wire.tensors import CODES, DTYPES

MAX_DEPTH = 100
MAX_META = 256 << 20
_MAX_INT_BYTES = 1 << 16
_PICKLE = b"\x80"  # how a pickle begins, and no message of ours

# What an array stands for. Only ever append.
(
    _LIST, _TUPLE, _DICT, _SET, _FROZENSET, _INT, _COMPLEX, _BYTEARRAY, _TENSOR, _AGAIN, _COO, _CSR, _SIZE, _DTYPE,
    _DEVICE, _DATACLASS, _REFERENCE, _EXPOSED,
) = range(18)  # fmt: skip

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_CODE_KINDS = (type, FunctionType, BuiltinFunctionType, MethodType)
_DEVICES = frozenset(("cpu", "cuda", "meta", "mps", "xpu", "hpu", "privateuseone"))
_Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_NO_ARGUMENTS = Encoded(_encode(()), [], (), PLAIN)
_NONE = Encoded(_encode(None), [], None)


# Writing


class _Writer:
    """Values of one message to what MessagePack has."""

    __slots__ = ("graph", "tensors", "travellers")

    def __init__(self, graph: list[torch.Tensor] | None) -> None:
        if graph is not None:
            graph.clear()  # of a try that failed
        self.graph = graph
        self.tensors = WrittenTensors()
        self.travellers: list[Any] = []

    def write(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind is _Tensor or kind is _Parameter:
            return self._write_tensor(value)
        if kind in _ATOMS:
            return value if kind is not int or -(1 << 63) <= value < 1 << 64 else _write_int(value)
        if depth > MAX_DEPTH:
            raise NotDataError(
                f"What is sent in a restricted job may be nested {MAX_DEPTH} deep, and not contain itself."
            )
        tag = _SEQUENCES.get(kind)
        if tag is not None:
            depth += 1
            return [tag, *[self.write(item, depth) for item in value]]
        if kind is dict:
            depth += 1
            return [_DICT, *[self.write(item, depth) for pair in value.items() for item in pair]]
        return self._write_rare(value, kind, depth)

    def _write_rare(self, value: Any, kind: type, depth: int) -> list[Any]:
        if kind is complex:
            return [_COMPLEX, value.real, value.imag]
        if kind is bytearray:
            return [_BYTEARRAY, bytes(value)]
        if kind is torch.Size:
            return [_SIZE, *value]
        if kind is torch.dtype and value in CODES:
            return [_DTYPE, CODES[value]]
        if kind is torch.device:
            return [_DEVICE, value.type, value.index]
        if kind in codec.reference_kinds:
            return [_REFERENCE, self._travel(value)]
        fields = exposed.fields_of(kind)
        if fields is not None:
            flat = [self.write(getattr(value, field), depth + 1) for field in fields]
            return [_DATACLASS, exposed.name_of(kind), *fields, *flat]
        if isinstance(value, _CODE_KINDS):
            name = exposed.name_of(value)
            if name is not None:
                return [_EXPOSED, name]
        raise _not_data(value)

    def _travel(self, value: Any) -> int:
        for place, traveller in enumerate(self.travellers):
            if traveller is value:
                return place
        self.travellers.append(value)
        return len(self.travellers) - 1

    def _write_tensor(self, tensor: torch.Tensor) -> list[Any]:
        tensors = self.tensors
        known = tensors.known(tensor)
        if known is not None:
            return [_AGAIN, known]
        requires_grad = tensor.requires_grad
        if requires_grad and self.graph is not None:
            self.graph.append(tensor)
        layout = tensor.layout
        if not tensor.is_cpu:
            raise NotDataError(f"A tensor on {tensor.device} can't be sent in a restricted job. Call .cpu() first.")
        if layout is torch.strided:
            return [_TENSOR, *tensors.write(tensor), requires_grad]
        if layout is torch.sparse_coo:
            plain = tensor.detach()
            parts = [[*tensors.write(part), False] for part in (sparse_indices(plain), sparse_values(plain))]
            return [_COO, *parts, list(tensor.shape), plain.is_coalesced(), requires_grad]
        if layout is torch.sparse_csr:
            plain = tensor.detach()
            found = plain.crow_indices(), plain.col_indices(), plain.values()
            return [_CSR, *[[*tensors.write(part), False] for part in found], list(tensor.shape), requires_grad]
        raise NotDataError(f"A restricted job sends dense, COO and CSR tensors, and this one is {layout}.")

    def encoded(self, whole: Any, flags: int) -> Encoded:
        try:
            meta = _encode(whole)
        except UnicodeEncodeError as error:
            raise NotDataError(f"Text with half a surrogate pair can't be sent in a restricted job: {error}") from error
        if len(meta) > MAX_META:
            raise NotDataError(
                f"A message of {len(meta)} bytes besides its tensors can't be sent in a restricted job, whose limit is "
                f"{MAX_META}. Send it in parts, or as tensors."
            )
        return Encoded(meta, self.tensors.buffers, self.tensors.keep, flags, self.travellers)


_SEQUENCES: dict[type, int] = {list: _LIST, tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}


def _write_int(value: int) -> list[Any]:
    size = value.bit_length() // 8 + 1
    if size > _MAX_INT_BYTES:
        raise NotDataError(f"A number of {size} bytes can't be sent in a restricted job: at most {_MAX_INT_BYTES}.")
    return [_INT, value.to_bytes(size, "little", signed=True)]


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
) -> Encoded:
    """Encode a call of a function that goes by its name."""
    if function is not None:
        raise NotDataError(
            f"{function!r} has no name that other workers could know it by, and a restricted job sends no code. Call a "
            "function of a module, with @farprop.rpc.expose on the worker that is called, or give the name as text."
        )
    if not kwargs:
        if not args:
            return _NO_ARGUMENTS
        if _ATOMS.issuperset(map(type, args)):
            try:
                return Encoded(_encode(args), [], args, PLAIN)
            except (OverflowError, UnicodeEncodeError):
                pass
        writer = _Writer(graph)
        flat = [writer.write(value) for value in args]
        return writer.encoded(flat, PLAIN)
    writer = _Writer(graph)
    flat = [writer.write(value) for value in args]
    named = [writer.write(item) for pair in kwargs.items() for item in pair]
    return writer.encoded([flat, named], 0)


def encode_value(value: Any, graph: list[torch.Tensor] | None = None, place: object = None) -> Encoded:
    """Encode what a function returned. Functions of farprop's own may return what they have encoded."""
    if value is None:
        return _NONE
    if type(value) is Encoded:
        return value
    writer = _Writer(graph)
    return writer.encoded(writer.write(value), 0)


# Reading


class _Reader:
    """What MessagePack has to the values of one message."""

    __slots__ = ("buffers", "tensors")

    def __init__(self, buffers: Sequence[Any]) -> None:
        self.buffers = buffers
        self.tensors: list[torch.Tensor] = []

    def read(self, item: Any, depth: int = 0) -> Any:
        kind = type(item)
        if kind in _ATOMS:
            return item
        if kind is not list or not item:
            raise ProtocolError(f"a message has a {kind.__name__} where a value should be")
        tag = item[0]
        if tag == _TENSOR:
            return self._noted(read_dense(item, 1, self.buffers))
        if depth > MAX_DEPTH:
            raise ProtocolError(f"a message is nested more than {MAX_DEPTH} deep")
        if type(tag) is not int or not 0 <= tag < len(_READERS):
            raise ProtocolError(f"a message has something of unknown kind {tag!r:.20}")
        return _READERS[tag](self, item, depth + 1)

    def _all(self, item: list[Any], depth: int) -> list[Any]:
        read = self.read
        return [read(item[at], depth) for at in range(1, len(item))]

    def _noted(self, tensor: torch.Tensor) -> torch.Tensor:
        self.tensors.append(tensor)
        return tensor

    def _tuple(self, item: list[Any], depth: int) -> tuple[Any, ...]:
        return tuple(self._all(item, depth))

    def _dict(self, item: list[Any], depth: int) -> Any:
        flat = self._all(item, depth)
        return _hashed(lambda: dict(zip(flat[::2], flat[1::2], strict=True)))

    def _set(self, item: list[Any], depth: int) -> Any:
        return _hashed(lambda: set(self._all(item, depth)))

    def _frozenset(self, item: list[Any], depth: int) -> Any:
        return _hashed(lambda: frozenset(self._all(item, depth)))

    def _int(self, item: list[Any], depth: int) -> int:
        (data,) = _of_kinds(item, bytes)
        if len(data) > _MAX_INT_BYTES:
            raise ProtocolError(f"a message has a number of {len(data)} bytes")
        return int.from_bytes(data, "little", signed=True)

    def _complex(self, item: list[Any], depth: int) -> complex:
        return complex(*_of_kinds(item, float, float))

    def _bytearray(self, item: list[Any], depth: int) -> bytearray:
        return bytearray(*_of_kinds(item, bytes))

    def _dense(self, item: list[Any], depth: int) -> torch.Tensor:
        return self._noted(read_dense(item, 1, self.buffers))

    def _again(self, item: list[Any], depth: int) -> Any:
        (place,) = _of_kinds(item, int)
        if not 0 <= place < len(self.tensors):
            raise ProtocolError("a message refers to a tensor that it does not have")
        return self.tensors[place]

    def _coo(self, item: list[Any], depth: int) -> torch.Tensor:
        return self._noted(read_coo(item[1:], self.buffers))

    def _csr(self, item: list[Any], depth: int) -> torch.Tensor:
        return self._noted(read_csr(item[1:], self.buffers))

    def _size(self, item: list[Any], depth: int) -> torch.Size:
        sizes = item[1:]
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
            raise ProtocolError("a message has a torch.Size that can't be")
        return torch.Size(sizes)

    def _dtype(self, item: list[Any], depth: int) -> Any:
        (code,) = _of_kinds(item, int)
        dtype = DTYPES[code] if 0 <= code < len(DTYPES) else None
        if dtype is None:
            raise ProtocolError(f"a message has a dtype {code} that this worker's torch does not have")
        return dtype

    def _device(self, item: list[Any], depth: int) -> torch.device:
        if len(item) != 3 or type(item[1]) is not str or item[1] not in _DEVICES:
            raise ProtocolError("a message has a torch.device that can't be")
        index = item[2]
        if index is None:
            return torch.device(item[1])
        if type(index) is not int or not 0 <= index < 128:
            raise ProtocolError("a message has a torch.device with a number that can't be")
        return torch.device(item[1], index)

    def _dataclass(self, item: list[Any], depth: int) -> Any:
        kind = _find(item[1] if len(item) > 1 else None, "dataclass")
        fields = exposed.fields_of(kind) if isinstance(kind, type) else None
        if fields is None:
            raise ProtocolError(f"a message has a {item[1]!r:.100}, which is no dataclass here")
        count = len(fields)
        if len(item) != 2 + 2 * count or tuple(item[2 : 2 + count]) != fields:
            raise ProtocolError(f"a message has a {kind.__qualname__} with other fields than {', '.join(fields)}")
        values = [self.read(item[at], depth) for at in range(2 + count, len(item))]
        try:
            return kind(**dict(zip(fields, values, strict=True)))
        except Exception as error:
            raise ProtocolError(f"{kind.__qualname__} refused what a message has for it: {error}") from error

    def _reference(self, item: list[Any], depth: int) -> Any:
        (place,) = _of_kinds(item, int)
        for rebuild in codec.reference_kinds.values():
            if place >= 0:
                try:
                    return rebuild(place)
                except IndexError:
                    break
        raise ProtocolError("a message has a reference that did not come with it")

    def _exposed(self, item: list[Any], depth: int) -> Any:
        return _find(item[1] if len(item) == 2 else None, "function or class")


_READERS: list[Callable[[_Reader, list[Any], int], Any]] = [
    _Reader._all, _Reader._tuple, _Reader._dict, _Reader._set, _Reader._frozenset, _Reader._int, _Reader._complex,
    _Reader._bytearray, _Reader._dense, _Reader._again, _Reader._coo, _Reader._csr, _Reader._size, _Reader._dtype,
    _Reader._device, _Reader._dataclass, _Reader._reference, _Reader._exposed,
]  # fmt: skip


def _of_kinds(item: list[Any], *kinds: type) -> list[Any]:
    """What follows the tag, if it is just of these types."""
    rest = item[1:]
    if tuple(map(type, rest)) != kinds:
        raise ProtocolError(f"a message has something of kind {item[0]} that makes no sense")
    return rest


def _hashed(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a message has a set or dict that can't be: {error}") from error


def _find(name: Any, what: str) -> Any:
    found = exposed.find(name) if type(name) is bytes else None
    if found is None:
        shown = name.decode(errors="replace") if type(name) is bytes else repr(name)
        raise NotExposedError(
            f"A message names a {what} {shown[:200]!r}, which is not exposed on the worker that it came to. Expose it "
            "there with farprop.rpc.expose."
        )
    return found


def _unpack(meta: bytes | bytearray | memoryview) -> Any:
    if len(meta) > MAX_META:
        raise ProtocolError(f"a message has {len(meta)} bytes besides its tensors, and the limit is {MAX_META}")
    try:
        return _decode(meta)
    except Exception as error:  # whatever msgspec thinks of it
        if bytes(meta[:1]) == _PICKLE:
            raise ProtocolError(
                "A pickle came to a worker of a restricted job, which reads data alone. Nothing of it was unpickled."
            ) from None
        raise ProtocolError(f"a message is no MessagePack: {error}") from error


def decode_call(
    meta: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The ``(args, kwargs)`` that ``encode_call`` took."""
    if flags & PLAIN and meta == _NO_ARGUMENTS.meta:
        return (), {}
    whole = _unpack(meta)
    if type(whole) is not list:
        raise ProtocolError("a message has no arguments")
    if flags & PLAIN:
        if _ATOMS.issuperset(map(type, whole)):
            return whole, {}
        read = _Reader(buffers).read
        return [read(item) for item in whole], {}
    if len(whole) != 2 or type(whole[0]) is not list or type(whole[1]) is not list:
        raise ProtocolError("a message has no arguments")
    read = _Reader(buffers).read
    args = [read(item) for item in whole[0]]
    names, values = whole[1][::2], [read(item) for item in whole[1][1::2]]
    if len(names) != len(values) or not all(type(name) is str for name in names):
        raise ProtocolError("a message has named arguments without names")
    return args, dict(zip(names, values, strict=True))


def decode_value(meta: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int) -> Any:
    """What ``encode_value`` took."""
    whole = _unpack(meta)
    return whole if type(whole) in _ATOMS else _Reader(buffers).read(whole)


def refuse(*_: Any) -> Any:
    """In the place of what encodes and decodes anything at all: profiles, and functions without a name."""
    raise ProtocolError("A restricted job sends no profiles, and no functions but by their names.")
