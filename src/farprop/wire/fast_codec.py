"""The codec of calls and results, with a fast path for the most common values: numbers, strings, dense tensors.

Torch's and pickle's general machinery costs several times what such a message needs. On the fast path a tensor becomes
a tuple of its bytes (or the number of the buffer that holds them, if they are many), dtype, size and ``requires_grad``,
a remote reference its index among the message's references, other values stay as they are, and pickle writes one tuple
of everything. If a value does not fit (another type, or a
tensor that is strided, sparse, or shares its storage with another one), ``encode_plain`` returns None, and the pickler
of ``codec`` encodes the message.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch

from farprop.wire.codec import class_reducers, encode, reference_kinds
from farprop.wire.message import CUT, FAST, Message
from farprop.wire.tensors import CODES, DTYPES, INLINE_LIMIT, Place, dense, requiring_grad, view_memory

ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_LOOKED_AT = ATOMS | {torch.Tensor}
# A tensor of any shape is made from NumPy's array in one short step. Without it torch needs two, with its dispatcher.
_NUMPY_DTYPES = [
    None if dtype is None else numpy.dtype(name) if (name := str(dtype)[6:]) in numpy.sctypeDict else None
    for dtype in DTYPES
]
_COMPLEX = frozenset(code for code, dtype in enumerate(DTYPES) if dtype is not None and dtype.is_complex)

_Tensor = torch.Tensor
_dumps = pickle.dumps
_loads = pickle.loads
_string_at = ctypes.string_at
_ndarray = numpy.ndarray
_from_numpy = torch.from_numpy
_NOTHING = _dumps((0, ()), 5)
_NONE = _dumps((0, (None,)), 5)
_MAX_VALUES = 16
_CUT = FAST | CUT
_is_grad_enabled = torch.is_grad_enabled
Plain = tuple[bytes, list[memoryview], Sequence[Any], int]


def encode_plain(values: tuple[Any, ...]) -> Plain | None:
    """The pickle of ``(mask, values)``, the buffers beside it, the references, and the message's flags.

    Bit i of the mask says that value i is a tensor. If there are references, the pickle is ``(mask, values, indices)``:
    the values at these indices are the numbers of references.
    """
    if not values:
        return _NOTHING, [], (), FAST
    types = tuple(map(type, values))
    references: list[Any] | tuple[()] = ()
    if not _LOOKED_AT.issuperset(types):
        if not _looked_at().issuperset(types):
            return None
        references = [value for value in values if type(value) in reference_kinds]
    if _Tensor not in types:
        if not references:
            return _dumps((0, values), 5), [], (), FAST
        numbered = list(values)
        return _dumps((0, numbered, _number_references(numbered, types)), 5), [], references, FAST
    mask = 0
    flags = FAST
    flat: list[Any] = []
    buffers: list[memoryview] = []
    storages: list[int] = []
    several = types.count(_Tensor) > 1
    for index, value in enumerate(values):
        if types[index] is _Tensor:
            mask |= 1 << index
            tensor = value
            value = _flatten(tensor, storages if several else None, buffers)
            if value is None:
                return None
            if value[3] and not tensor.is_leaf:
                flags = _CUT  # unless the message belongs to an autograd context
        flat.append(value)
    if references:
        return _dumps((mask, flat, _number_references(flat, types)), 5), buffers, references, flags
    return _dumps((mask, flat), 5), buffers, (), flags


def _looked_at() -> frozenset[type]:
    """The types of ``_LOOKED_AT`` and references, which are registered by a module that imports this one."""
    global _looked_at_all
    if len(_looked_at_all) != len(_LOOKED_AT) + len(reference_kinds):
        _looked_at_all = _LOOKED_AT.union(reference_kinds)
    return _looked_at_all


_looked_at_all: frozenset[type] = _LOOKED_AT


def _number_references(flat: list[Any], types: Sequence[type]) -> tuple[int, ...]:
    """Replace the references in a list by their numbers; returns their indices."""
    indices = tuple([index for index, kind in enumerate(types) if kind in reference_kinds])
    for number, index in enumerate(indices):
        flat[index] = number
    return indices


def _flatten(
    tensor: torch.Tensor, storages: list[int] | None, buffers: list[memoryview]
) -> tuple[bytearray | int, int, tuple[int, ...], bool] | None:
    code = CODES.get(tensor.dtype)
    if code is None or not tensor.is_cpu:
        return None
    try:
        if not tensor.is_contiguous():
            return None
    except RuntimeError:
        return None  # sparse
    size = tensor.nbytes
    # Torch keeps conjugation and negation as lazy bits, which are not in the memory. A negative view of more than one
    # element is never contiguous, and only complex tensors can be conjugates.
    if not size or (code in _COMPLEX and tensor.is_conj()) or (size <= 16 and tensor.is_neg()):
        return None
    if storages is not None:
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages:
            return None
        storages.append(storage)
    data: bytearray | int
    if size < INLINE_LIMIT:
        data = bytearray(_string_at(tensor.data_ptr(), size))
    else:
        data = len(buffers)
        buffers.append(view_memory(tensor.data_ptr(), size))
    return data, code, tuple(tensor.shape), tensor.requires_grad


def decode_plain(meta: Any, buffers: Sequence[Any]) -> Sequence[Any]:
    if meta == _NOTHING:
        return ()
    mask, values, *references = _loads(meta)
    if references:
        (resolve,) = reference_kinds.values()
        for index in references[0]:
            values[index] = resolve(values[index])
    index = 0
    while mask:
        if mask & 1:
            data, code, size, requires_grad = values[index]
            numpy_dtype = _NUMPY_DTYPES[code]
            if type(data) is int:
                values[index] = dense(buffers[data], code, size, requires_grad)
            elif numpy_dtype is None:
                values[index] = dense(data, code, size, requires_grad)
            else:
                tensor = _from_numpy(_ndarray(size, numpy_dtype, data))
                values[index] = requiring_grad(tensor) if requires_grad else tensor
        mask >>= 1
        index += 1
    return values  # type: ignore[no-any-return]


# Calls and answers: the fast path if it fits, else the pickler


def encode_call(
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    graph: list[torch.Tensor] | None = None,
    place: Place | None = None,
    encode: Callable[..., Message] = encode,
) -> Message:
    """Encode a call: ``(args, kwargs)``, or ``(function, args, kwargs)`` if the function has no importable name.

    ``encode`` encodes what does not fit the fast path.
    """
    if function is not None:
        return encode((function, args, kwargs), graph, place)
    if not kwargs and place is None and len(args) <= _MAX_VALUES and _Tensor not in class_reducers:
        plain = encode_plain(args)
        if plain is not None:
            if graph is None:
                flags = FAST if plain[3] == FAST or not _is_grad_enabled() else _CUT
                return Message(plain[0], plain[1], args, flags, plain[2])
            for value in args:
                if type(value) is _Tensor and value.requires_grad:
                    graph.append(value)
            return Message(plain[0], plain[1], args, FAST, plain[2])
    return encode((args, kwargs), graph, place)


def decode_call(
    payload: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Decode the ``(args, kwargs)`` of a function that travels by its name."""
    if flags & FAST:
        return decode_plain(payload, buffers), {}
    return _loads(payload, buffers=buffers)  # type: ignore[no-any-return]


def encode_value(
    value: Any,
    graph: list[torch.Tensor] | None = None,
    place: Place | None = None,
    encode: Callable[..., Message] = encode,
) -> Message:
    """Encode a function's result. Farprop's own methods may return a message that is encoded already."""
    if value is None:
        return Message(_NONE, [], None, FAST)
    if type(value) is Message:
        return value
    if type(value) in _LOOKED_AT and place is None and _Tensor not in class_reducers:
        plain = encode_plain((value,))
        if plain is not None:
            if graph is None:
                flags = FAST if plain[3] == FAST or not _is_grad_enabled() else _CUT
                return Message(plain[0], plain[1], value, flags, plain[2])
            if type(value) is _Tensor and value.requires_grad:
                graph.append(value)
            return Message(plain[0], plain[1], value, FAST, plain[2])
    return encode(value, graph, place)


def decode_value(payload: bytes | bytearray | memoryview, buffers: Sequence[Any], flags: int) -> Any:
    if flags & FAST:
        return None if payload == _NONE else decode_plain(payload, buffers)[0]
    return _loads(payload, buffers=buffers)
