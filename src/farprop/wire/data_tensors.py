"""Tensors in the messages of restricted jobs: bytes, dtype and shape. The reader checks that they fit."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from farprop.errors import NotDataError, ProtocolError
from farprop.wire.tensors import CODES, DTYPES, INLINE_LIMIT, requiring_grad, view_memory

_MAX_DIMS = 64
_MAX_ELEMENTS = 1 << 60
_SIZES = [0 if dtype is None else dtype.itemsize for dtype in DTYPES]
_BOOL = CODES[torch.bool]
# A tensor of any shape is made from NumPy's array in one short step. Bool is missing: its bytes are checked first.
_NUMPY_DTYPES = [
    numpy.dtype(name) if dtype is not None and (name := str(dtype)[6:]) in numpy.sctypeDict and name != "bool" else None
    for dtype in DTYPES
]
_INT = frozenset((int,))
_string_at = ctypes.string_at
_ndarray = numpy.ndarray
_from_numpy = torch.from_numpy


class WrittenTensors:
    """The tensors of a message, in order, and the buffers of the large ones."""

    __slots__ = ("_known", "_memory", "_tensors", "buffers")

    def __init__(self) -> None:
        self.buffers: list[memoryview] = []
        self._tensors: list[torch.Tensor] = []
        self._memory: list[torch.Tensor] = []
        self._known: dict[int, int] = {}

    def known(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor that the message has already, or None; from now on the message has it."""
        place = self._known.setdefault(id(tensor), len(self._known))
        if place < len(self._tensors):
            return place
        self._tensors.append(tensor)  # keeps its id from being reused
        return None

    @property
    def keep(self) -> Any:
        """The objects that own the buffers' memory."""
        return self._memory or None

    def write(self, tensor: torch.Tensor) -> tuple[bytes | int, int, tuple[int, ...]]:
        code = CODES.get(tensor.dtype)
        if code is None:
            raise NotDataError(f"A restricted job can't send a tensor of dtype {tensor.dtype}.")
        size = tensor.nbytes
        shape = tuple(tensor.shape)
        if not size:
            return b"", code, shape
        # Torch keeps conjugation and negation as lazy bits, which are not in the memory.
        if tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()):
            tensor = tensor.detach().resolve_conj().resolve_neg()
        if not tensor.is_contiguous():
            tensor = tensor.detach().contiguous()
        if size < INLINE_LIMIT:
            return _string_at(tensor.data_ptr(), size), code, shape
        self._memory.append(tensor)
        self.buffers.append(view_memory(tensor.data_ptr(), size))
        return len(self.buffers) - 1, code, shape


def _check_size(code: Any, shape: Any, data_bytes: int) -> None:
    """Raises unless a tensor of this dtype and shape has exactly ``data_bytes`` bytes."""
    if type(code) is not int or not 0 <= code < len(_SIZES) or not _SIZES[code]:
        raise ProtocolError(f"a message has a tensor of dtype {code!r:.20}, which this worker's torch does not have")
    if not data_bytes or type(shape) is not list or len(shape) > _MAX_DIMS or not _INT.issuperset(map(type, shape)):
        check_shape(shape)
    elif shape and min(shape) < 0:
        raise ProtocolError("a message has a tensor whose shape can't be")
    if math.prod(shape) * _SIZES[code] != data_bytes:
        raise ProtocolError(f"a message has a tensor of shape {shape} and {data_bytes} bytes, which do not fit")


def check_shape(shape: Any) -> None:
    """Raises unless torch can represent the shape. Torch multiplies the sizes even of tensors without memory."""
    if type(shape) is not list or len(shape) > _MAX_DIMS or not _INT.issuperset(map(type, shape)):
        raise ProtocolError("a message has a tensor whose shape makes no sense")
    if shape and (min(shape) < 0 or math.prod([size or 1 for size in shape]) > _MAX_ELEMENTS):
        raise ProtocolError("a message has a tensor whose shape can't be")


def read_dense(item: list[Any], at: int, buffers: Sequence[Any]) -> torch.Tensor:
    """Read a dense tensor from the elements of ``item`` from index ``at`` on."""
    if len(item) != at + 4 or type(item[at + 3]) is not bool:
        raise ProtocolError("a message has a tensor that makes no sense")
    data, code, shape, requires_grad = item[at:]
    if type(data) is bytes:
        _check_size(code, shape, len(data))
        numpy_dtype = _NUMPY_DTYPES[code]
        if numpy_dtype is not None and data:
            tensor = _from_numpy(_ndarray(shape, numpy_dtype, bytearray(data)))
            return _requiring_grad(tensor) if requires_grad else tensor
        memory: Any = bytearray(data)
    else:
        if type(data) is not int or not 0 <= data < len(buffers):
            raise ProtocolError("a message has a tensor without its bytes")
        memory = buffers[data]
        _check_size(code, shape, memoryview(memory).nbytes)
    # Torch's kernels rely on bools being 0 or 1, and write out of bounds otherwise.
    if code == _BOOL and memory and bool((torch.frombuffer(memory, dtype=torch.uint8) > 1).any()):
        raise ProtocolError("a message has a tensor of truth values that are neither true nor false")
    dtype = DTYPES[code]
    assert dtype is not None
    try:
        if 0 in shape:
            tensor = torch.empty(shape, dtype=dtype)
        else:
            tensor = torch.frombuffer(memory, dtype=dtype)
            if len(shape) != 1:
                tensor.resize_(shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise _nonsense(error) from error
    return _requiring_grad(tensor) if requires_grad else tensor


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ProtocolError(f"a message has a tensor of {tensor.dtype} that requires grad")
    return requiring_grad(tensor)


def read_coo(item: list[Any], buffers: Sequence[Any]) -> torch.Tensor:
    if len(item) != 5 or type(item[3]) is not bool or type(item[4]) is not bool:
        raise ProtocolError("a message has a sparse tensor that makes no sense")
    indices, values = (_part(part, buffers) for part in item[:2])
    if indices.dtype is not torch.int64:
        raise ProtocolError(f"a message has a sparse tensor whose indices are {indices.dtype}")
    shape = item[2]
    check_shape(shape)
    try:
        tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)
        if item[3]:
            tensor = tensor.coalesce()  # the sender claims that it is coalesced, and may be wrong
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise _nonsense(error) from error
    return _requiring_grad(tensor) if item[4] else tensor


def read_csr(item: list[Any], buffers: Sequence[Any]) -> torch.Tensor:
    if len(item) != 5 or type(item[4]) is not bool:
        raise ProtocolError("a message has a sparse tensor that makes no sense")
    rows, columns, values = (_part(part, buffers) for part in item[:3])
    shape = item[3]
    check_shape(shape)
    try:
        tensor = torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=True)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise _nonsense(error) from error
    return _requiring_grad(tensor) if item[4] else tensor


def _part(item: Any, buffers: Sequence[Any]) -> torch.Tensor:
    if type(item) is not list or len(item) != 4 or item[3] is not False:
        raise ProtocolError("a message has a sparse tensor without its parts")
    return read_dense(item, 0, buffers)


def _nonsense(error: Exception) -> ProtocolError:
    return ProtocolError(f"a message has a tensor that torch refuses: {error}")
