"""The decoder of restricted jobs: turns MessagePack's types into values, and trusts nothing that it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farprop.errors import NotExposedError, ProtocolError
from farprop.wire import codec, exposed
from farprop.wire.data_tensors import read_coo, read_csr, read_dense
from farprop.wire.tensors import DTYPES

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


class Reader:
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


_READERS: list[Callable[[Reader, list[Any], int], Any]] = [
    Reader._all, Reader._tuple, Reader._dict, Reader._set, Reader._frozenset, Reader._int, Reader._complex,
    Reader._bytearray, Reader._dense, Reader._again, Reader._coo, Reader._csr, Reader._size, Reader._dtype,
    Reader._device, Reader._dataclass, Reader._reference, Reader._exposed,
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
