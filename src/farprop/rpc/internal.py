"""Names of torch's ``rpc.internal`` that programs use: its pickler, and the key of a call in the profiler."""

from __future__ import annotations

import ctypes
import enum
from typing import Any, NamedTuple

import torch

from farprop.wire.codec import decode, decode_with, encode


class RPCExecMode(enum.Enum):
    """How a call was made."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call: the function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


class _InternalRPCPickler:
    """Objects to bytes and tensors. Derive from it to encode calls differently, and use it with
    ``_use_rpc_pickler``.
    """

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        """The pickle, and a list of what can't be in it: tensors, and behind them references."""
        encoded = encode(obj)
        for traveller in encoded.travellers:
            traveller._source("fork an UserRRef")  # raises for one that can't travel
        tensors = [torch.frombuffer(bytearray(b), dtype=torch.uint8) for b in encoded.buffers]
        return encoded.meta, [*tensors, *encoded.travellers]

    def deserialize(self, binary_data: bytes, tensor_table: list[Any]) -> Any:
        tensors = [t for t in tensor_table if isinstance(t, torch.Tensor)]
        buffers = [bytearray(ctypes.string_at(t.data_ptr(), t.nbytes)) for t in tensors]
        return decode_with(tensor_table[len(tensors) :], decode, binary_data, buffers)


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: Any) -> tuple[bytes, list[Any]]:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[Any]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def run_pickled(binary_data: bytes, tensor_table: list[Any]) -> Any:
    """Run a call that a pickler of the caller's own encoded."""
    call = deserialize(binary_data, tensor_table)
    return call.func(*call.args, **call.kwargs)


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name under which the profiler shows a call."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
