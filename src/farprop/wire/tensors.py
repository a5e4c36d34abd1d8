"""Reduces strided CPU tensors to bytes, dtype, shape and strides, and rebuilds them.

Rules that hold here:

- A message holds one range of bytes per storage. The first tensor on a storage carries the range; later ones are
  rebuilt as views of the first, so they share memory at the receiver.
- Ranges shorter than ``INLINE_LIMIT`` travel in the pickle as a ``bytearray``, longer ones as out-of-band buffers.
- Other tensors (sparse, quantised, a subclass, ...) are left to torch's own reduction.
- A tensor that is not on the CPU raises ``DeviceMapRequired``. The runtime catches it, looks up the device map and
  encodes the message again with a ``Place``. So messages of CPU tensors pay nothing for device maps.
"""

from __future__ import annotations

import ctypes
import pickle
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from farprop.errors import UsageError

INLINE_LIMIT = 32 * 1024
# A view whose span exceeds its elements by this many bytes is copied to a contiguous tensor before it is sent.
MAX_WASTE = 1 << 20

# The position in this list is the dtype's code on the wire: only ever append.
_DTYPE_NAMES = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "complex64",
    "complex128",
    "complex32",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "bits8",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "float4_e2m1fn_x2",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
]
DTYPES: list[torch.dtype | None] = [getattr(torch, name, None) for name in _DTYPE_NAMES]
CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}

_STRIDED = torch.strided
_CPU_ONLY = (
    "A tensor on {device} can't be sent: no device map says where it goes. Call .cpu() first, or give "
    "TensorPipeRpcBackendOptions a device_map for the worker you call."
)

# Maps a device of this worker to one of the receiver; raises UsageError if no device map covers it.
Place = Callable[[torch.device], str]

_memoryview_from = ctypes.pythonapi.PyMemoryView_FromMemory
_memoryview_from.restype = ctypes.py_object
_memoryview_from.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_PYBUF_WRITE = 0x200
_string_at = ctypes.string_at


def view_memory(address: int, size: int) -> memoryview:
    """A writable view of memory. The caller keeps the memory alive."""
    return _memoryview_from(address, size, _PYBUF_WRITE)  # type: ignore[no-any-return]


class Sent(NamedTuple):
    """The range of a storage that the message already holds, and the tensor that carries it."""

    carrier: torch.Tensor
    start: int
    end: int


class DeviceMapRequired(UsageError):
    """A tensor is not on the CPU, and the message is encoded without a ``Place``."""

    @classmethod
    def on(cls, device: torch.device) -> DeviceMapRequired:
        return cls(_CPU_ONLY.format(device=device))


class SpanTooShort(Exception):
    """A second view needs bytes outside the range already sent: encode again with the whole storage."""

    def __init__(self, storage: int) -> None:
        self.storage = storage


def reduce_tensor(tensor: torch.Tensor, sent: dict[int, Sent], whole: frozenset[int] | None) -> tuple[Any, ...] | None:
    """Reduce a tensor for pickle.

    Args:
        tensor: a tensor of exactly torch's own class.
        sent: by address, the storages that the message holds already; updated.
        whole: addresses of storages to send entirely.

    Returns:
        The function that rebuilds the tensor and its arguments, or None to leave the tensor to torch.

    Raises:
        DeviceMapRequired: the tensor is not on the CPU.
        SpanTooShort: the message already holds a range of the storage that does not cover the tensor.
    """
    code = CODES.get(tensor.dtype)
    if code is None or tensor.layout is not _STRIDED:
        if not tensor.is_cpu and not tensor.is_meta:
            raise DeviceMapRequired.on(tensor.device)
        return None
    if not tensor.is_cpu:
        if tensor.device.type == "meta":
            return None
        raise DeviceMapRequired.on(tensor.device)
    if tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()):
        # Torch keeps conjugation and negation as lazy bits, which are not in the memory; the clone has none.
        tensor = tensor.resolve_conj().resolve_neg()
    size = tuple(tensor.shape)
    count = tensor.numel()
    if count == 0:
        return _empty, (code, size, tensor.stride(), tensor.requires_grad)
    item = tensor.element_size()
    if tensor.is_contiguous():
        stride, span = None, count
    else:
        stride = tensor.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        if (span - count) * item > MAX_WASTE:
            tensor = tensor.detach().contiguous().requires_grad_(tensor.requires_grad)
            stride, span = None, count
    storage = tensor.untyped_storage()
    base = storage.data_ptr()
    start = int(tensor.storage_offset()) * item
    end = start + span * item
    earlier = sent.get(base)
    if earlier is not None:
        if start < earlier.start or end > earlier.end:
            raise SpanTooShort(base)
        # The offset is in bytes, because the carrier may have another dtype.
        return _view, (
            earlier.carrier, code, size, tensor.stride(), start - earlier.start, tensor.requires_grad,
        )  # fmt: skip
    offset = 0
    if whole is not None and base in whole:
        offset, start, end = start // item, 0, storage.nbytes()
        stride = tensor.stride()
    sent[base] = Sent(tensor, start, end)
    if end - start < INLINE_LIMIT:
        data: Any = bytearray(_string_at(base + start, end - start))
    else:
        data = pickle.PickleBuffer(view_memory(base + start, end - start))
    if stride is None:
        return dense, (data, code, size, tensor.requires_grad)
    return _strided, (data, code, size, stride, offset, tensor.requires_grad)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether the graph of a tensor that requires grad stays behind, unlike what a program means to send. Parameters
    and other leaves have none, and with grad off tensors are sent as values.
    """
    return not tensor.is_leaf and torch.is_grad_enabled()


class _Collecting(threading.local):
    """Collects the tensors that require grad in the message that this thread decodes, if ``tensors`` is a list."""

    tensors: list[torch.Tensor] | None = None


collecting = _Collecting()


def requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    """Collect a tensor that required grad at the sender or, without a collector, make it a leaf."""
    tensors = collecting.tensors
    if tensors is None:
        return tensor.requires_grad_()
    tensors.append(tensor)
    return tensor


# The functions below run at the receiver; pickles name them.


def _dtype(code: int) -> torch.dtype:
    dtype = DTYPES[code]
    if dtype is None:
        raise UsageError(f"This worker's torch has no dtype {_DTYPE_NAMES[code]}. Run the same torch on every worker.")
    return dtype


def dense(data: Any, code: int, size: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    """A contiguous tensor on ``data``, which it takes over."""
    tensor = torch.frombuffer(data, dtype=DTYPES[code] or _dtype(code))
    if len(size) != 1:
        tensor.resize_(size)  # sets the shape without making a view: a view could not be detached in place
    return requiring_grad(tensor) if requires_grad else tensor


def _strided(
    data: Any, code: int, size: tuple[int, ...], stride: tuple[int, ...], offset: int, requires_grad: bool
) -> torch.Tensor:
    dtype = _dtype(code)
    count = memoryview(data).nbytes // dtype.itemsize
    tensor = torch.frombuffer(data, dtype=dtype, count=count).as_strided_(size, stride, offset)
    return requiring_grad(tensor) if requires_grad else tensor


def _empty(code: int, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    tensor = torch.empty_strided(size, stride, dtype=_dtype(code))
    return requiring_grad(tensor) if requires_grad else tensor


def _view(
    carrier: torch.Tensor,
    code: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    offset: int,
    requires_grad: bool,
) -> torch.Tensor:
    dtype = _dtype(code)
    tensor = torch.empty(0, dtype=dtype)
    tensor.set_(carrier.untyped_storage(), offset // dtype.itemsize, size, stride)
    return requiring_grad(tensor) if requires_grad else tensor


def placed(tensor: torch.Tensor, device: str, requires_grad: bool) -> torch.Tensor:
    """Move a tensor to the device that the sender's device map names.

    The copy is done when this returns, on whatever stream it is used: ``to`` waits for copies from unpinned memory.
    """
    try:
        moved = tensor.to(device)
    except Exception as error:
        raise UsageError(
            f"This worker can't put a tensor on its device {device}, which the device map of a caller names: {error}"
        ) from error
    return requiring_grad(moved) if requires_grad else moved
