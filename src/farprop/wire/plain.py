"""The short way for the commonest messages: a few numbers, strings and dense tensors, and nothing else.

Torch's and pickle's general machinery costs several times what such a message needs. Here a tensor becomes a tuple of
its bytes (or the number of the buffer that holds them, if they are many), dtype, size and ``requires_grad``, the rest
stays as it is, and plain pickle does the whole tuple. Anything that does not fit (another type, a tensor that is
strided, sparse, or shares its storage with another one) makes ``encode_plain`` return None, and the general codec takes
over.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from farprop.wire.tensors import CODES, DTYPES, INLINE_LIMIT, dense, requiring_grad, view_memory

ATOMS = frozenset((type(None), bool, int, float, str, bytes))
_LOOKED_AT = ATOMS | {torch.Tensor}
# From NumPy's array to a tensor of any shape is one short step; without it torch needs two, through its dispatcher.
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


def encode_plain(values: tuple[Any, ...]) -> tuple[bytes, list[memoryview]] | None:
    """The pickle of ``(mask, values)``, and the buffers beside it; bit i of the mask says that value i is a tensor."""
    if not values:
        return _NOTHING, []
    types = tuple(map(type, values))
    if _Tensor not in types:
        return (_dumps((0, values), 5), []) if ATOMS.issuperset(types) else None
    if not _LOOKED_AT.issuperset(types):
        return None
    mask = 0
    flat: list[Any] = []
    buffers: list[memoryview] = []
    storages: list[int] = []
    several = types.count(_Tensor) > 1
    for index, value in enumerate(values):
        if types[index] is _Tensor:
            mask |= 1 << index
            value = _flatten(value, storages if several else None, buffers)
            if value is None:
                return None
        flat.append(value)
    return _dumps((mask, flat), 5), buffers


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
    # The bits for 'conjugate' and 'negative' are not in the memory. A negative view of more than one element is never
    # contiguous, and only complex tensors can be conjugates.
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
    mask, values = _loads(meta)
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
