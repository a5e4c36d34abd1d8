"""The codec of restricted jobs: MessagePack, written and read by msgspec. Messages hold data, never code.

A value is a number, text, bytes, None, or an array whose first element is a tag for the type. Rules that hold here:

- Any bytes decode to a value or raise ``ProtocolError`` (``NotExposedError`` for a name that is not exposed). The
  memory used is proportional to the number of bytes.
- A message can name only functions, classes and dataclasses that this process has exposed.
- A tensor's dtype and shape fit its bytes exactly, and the indices of sparse tensors are checked.
- Large tensors travel as buffers beside the message, as in ``codec``. Both ends collect the tensors that require grad
  in the same order.
- An exception travels as the name of its type and its text. The caller raises it as its own type if the type is built
  into Python or defined by farprop. Tracebacks don't travel, because they would show code and paths to a worker that
  may belong to somebody else.
"""

from __future__ import annotations

import builtins
from collections import Counter
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import msgspec
import torch

from farprop import errors
from farprop._torch import sparse_indices, sparse_values
from farprop.errors import NotDataError, NotExposedError, ProtocolError, RemoteError
from farprop.wire import codec, exposed
from farprop.wire.data_tensors import WrittenTensors, read_coo, read_csr, read_dense
from farprop.wire.message import CUT, FAST, Message
from farprop.wire.tensors import CODES, DTYPES, is_cut

MAX_META = 256 << 20
MAX_DEPTH = 100
MAX_INT_BYTES = 1 << 16

# The tags of arrays. They are part of the wire format: only ever append.
(
    LIST, TUPLE, DICT, SET, FROZENSET, INT, COMPLEX, BYTEARRAY, TENSOR, AGAIN, COO, CSR, SIZE, DTYPE,
    DEVICE, DATACLASS, REFERENCE, EXPOSED,
) = range(18)  # fmt: skip

ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_DEVICES = frozenset(("cpu", "cuda", "meta", "mps", "xpu", "hpu", "privateuseone"))

_FEW_KEYS, _MOST_ALIKE = 1000, 64
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

    __slots__ = ("graph", "is_cut", "out_of_band", "tensors")

    def __init__(self, graph: list[torch.Tensor] | None) -> None:
        if graph is not None:
            graph.clear()  # an earlier try may have filled it
        self.graph = graph
        self.is_cut = False
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
        if requires_grad:
            if self.graph is not None:
                self.graph.append(tensor)
            elif is_cut(tensor):
                self.is_cut = True
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
        flags |= CUT if self.is_cut else 0
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


# Reading: trusts nothing that it reads


class _Reader:
    """Turns MessagePack's types into the values of one message."""

    __slots__ = ("buffers", "tensors")

    def __init__(self, buffers: Sequence[Any]) -> None:
        self.buffers = buffers
        self.tensors: list[torch.Tensor] = []

    def read(self, item: Any, depth: int = 0) -> Any:
        kind = type(item)
        if kind in ATOMS:
            return item
        if kind is not list or not item:
            raise ProtocolError(f"a message has a {kind.__name__} where a value should be")
        tag = item[0]
        if tag == TENSOR:
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
        return _hashed(lambda keys: dict(zip(keys, flat[1::2], strict=True)), flat[::2])

    def _set(self, item: list[Any], depth: int) -> Any:
        return _hashed(set, self._all(item, depth))

    def _frozenset(self, item: list[Any], depth: int) -> Any:
        return _hashed(frozenset, self._all(item, depth))

    def _int(self, item: list[Any], depth: int) -> int:
        (data,) = _of_kinds(item, bytes)
        if len(data) > MAX_INT_BYTES:
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
    """Return the elements after the tag; raises unless they have exactly these types."""
    rest = item[1:]
    if tuple(map(type, rest)) != kinds:
        raise ProtocolError(f"a message has something of kind {item[0]} that makes no sense")
    return rest


def _hashed(make: Callable[[list[Any]], Any], keys: list[Any]) -> Any:
    try:
        # Keys with equal hashes make lookups quadratic, and integers with equal hashes are easy to find.
        if len(keys) > _FEW_KEYS and max(Counter(map(hash, keys)).values()) > _MOST_ALIKE:
            raise ProtocolError("a message has a set or dict whose keys were made to have the same hash")
        return make(keys)
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
    """Decode the value that ``encode_value`` took."""
    whole = _unpack(meta)
    return whole if type(whole) in ATOMS else _Reader(buffers).read(whole)


def refuse(*_: Any) -> Any:
    """Stands in for the decoder of pickled functions, which restricted jobs refuse."""
    raise ProtocolError("A restricted job sends functions by their names alone.")


# Exceptions

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
_decode_parts = msgspec.msgpack.Decoder(tuple[str, str, list[str], str]).decode


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
        type_name, text, notes, worker = _decode_parts(meta)
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
    made.add_note(f"Raised on {worker} by the function that was called there. Its debug log has the traceback.")
    return made
