"""Names of torch's ``rpc.internal`` that programs use: its pickler, what a failed call becomes, keys in profiles.

Calls and results go through ``farprop.wire``, not through the pickler here. It is for programs that derive one of their
own from it (``_use_rpc_pickler``), which then encodes the calls of Python functions, and for those that register how a
class is pickled.
"""

from __future__ import annotations

import copyreg
import enum
import io
import pickle
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from farprop._torch import ScriptModule, load_script, save_script
from farprop.rpc.functions import async_execution
from farprop.runtime.current import current_agent
from farprop.wire import codec

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_get_current_rpc_agent = current_agent
_pickler = pickle.Pickler
_unpickler = pickle.Unpickler

# What a pickle being written or read refers to by number: tensors, and references.
_thread_local_tensor_tables = threading.local()


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


class RemoteException(NamedTuple):
    """What ``_run_function`` makes of an exception: its text with the traceback, and its type."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Objects to a pickle and a table of the tensors in it.

    Derive from it to encode calls differently, and use it with ``_use_rpc_pickler``. ``_dispatch_table`` says for a
    class how its objects are reduced, as ``copyreg.dispatch_table`` does. What it says of ``torch.Tensor`` decides how
    tensors travel: the entry that is there from the start puts them into the table.
    """

    def __init__(self) -> None:
        self._dispatch_table: dict[Any, Callable[[Any], Any]] = copyreg.dispatch_table.copy()
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[Any, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Have objects of a class reduced by ``reducer(obj)``. The first that is registered for a class stays."""
        self._class_reducer_dict.setdefault(obj_class, reducer)

    @classmethod
    def _tensor_receiver(cls, tensor_index: int) -> Any:
        return _thread_local_tensor_tables.recv_tables[tensor_index]

    def _tensor_reducer(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return _InternalRPCPickler._tensor_receiver, (send_along(tensor),)

    @classmethod
    def _py_rref_receiver(cls, rref_fork_data: Any) -> Any:
        from farprop.rpc.rref import RRef

        return RRef._deserialize(rref_fork_data)

    def _py_rref_reducer(self, py_rref: Any) -> tuple[Any, ...]:
        return _InternalRPCPickler._py_rref_receiver, (py_rref._serialize(),)

    def _rref_reducer(self, rref: Any) -> tuple[Any, ...]:
        return self._py_rref_reducer(rref)

    @classmethod
    def _script_module_receiver(cls, script_module_serialized: bytes) -> Any:
        return load_script(io.BytesIO(script_module_serialized))

    def _script_module_reducer(self, script_module: Any) -> tuple[Any, ...]:
        file = io.BytesIO()
        save_script(script_module, file)
        return _InternalRPCPickler._script_module_receiver, (file.getvalue(),)

    def serialize(self, obj: Any) -> tuple[bytes, list[Any]]:
        """The pickle, and the table of what it refers to by number: tensors, and references."""
        from farprop.rpc.rref import RRef

        reducers = {**self._dispatch_table, RRef: self._rref_reducer}
        if isinstance(obj, ScriptModule):
            reducers[type(obj)] = self._script_module_reducer
        reducers.update(self._class_reducer_dict)
        tables = _thread_local_tensor_tables
        outer = getattr(tables, "send_tables", None)
        table: list[Any] = []
        tables.send_tables = table
        try:
            # What plain pickle can't name is pickled again, and then the table is filled from the start.
            return codec.encode_with(reducers, obj, table.clear), table
        finally:
            if outer is None:
                del tables.send_tables
            else:
                tables.send_tables = outer

    def deserialize(self, binary_data: bytes, tensor_table: list[Any]) -> Any:
        """The object. If something in it can't be found here, what is returned is the ``AttributeError``."""
        tables = _thread_local_tensor_tables
        outer = getattr(tables, "recv_tables", None)
        tables.recv_tables = tensor_table
        try:
            return _unpickler(io.BytesIO(binary_data)).load()
        except AttributeError as error:
            missing = AttributeError(
                f"{error} The default RPC pickler does not serialize function code: a function that is called has to "
                "be defined in the same module on the caller and on the callee."
            )
            missing.__cause__ = error
            return missing
        finally:
            if outer is None:
                del tables.recv_tables
            else:
                tables.recv_tables = outer


class _DefaultDispatchTable(dict[Any, Callable[[Any], Any]]):
    """That of the default pickler: what a program puts there holds for all calls and results."""

    def __setitem__(self, kind: Any, reducer: Callable[[Any], Any]) -> None:
        super().__setitem__(kind, reducer)
        codec.class_reducers[kind] = reducer


_internal_rpc_pickler = _InternalRPCPickler()
_internal_rpc_pickler._dispatch_table = _DefaultDispatchTable(_internal_rpc_pickler._dispatch_table)
_internal_rpc_pickler._class_reducer_dict = codec.class_reducers


def serialize(obj: Any) -> tuple[bytes, list[Any]]:
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[Any]) -> Any:
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def send_along(obj: Any) -> int:
    """Put something into the table of the pickle that this thread writes; its number there."""
    table: list[Any] = _thread_local_tensor_tables.send_tables
    table.append(obj)
    return len(table) - 1


def is_serializing() -> bool:
    """Whether this thread writes a pickle with a table."""
    return hasattr(_thread_local_tensor_tables, "send_tables")


# What runs on the callee.


def run_pickled(binary_data: bytes, tensor_table: list[Any]) -> Any:
    """Run a call that a pickler of the caller's own encoded."""
    call = deserialize(binary_data, tensor_table)
    if isinstance(call, AttributeError):
        raise call
    return call.func(*call.args, **call.kwargs)


@async_execution
def run_pickled_async(binary_data: bytes, tensor_table: list[Any]) -> Any:
    """The same for a function that is decorated with ``async_execution``."""
    return run_pickled(binary_data, tensor_table)


def _run_function(python_udf: Any) -> Any:
    """Run a call. What it raises comes back as a ``RemoteException``, and is printed."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as error:
        text = f"On {current_agent().get_worker_info()}:\n{error!r}\n{traceback.format_exc()}"
        print(text, file=sys.stderr)
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raise what a ``RemoteException`` stands for; anything else is left alone."""
    if not isinstance(result, RemoteException):
        return
    text = result.msg.encode("utf-8").decode("unicode_escape")
    try:
        error = result.exception_type(text)
    except BaseException as failure:
        raise RuntimeError(
            f"Failed to create original exception type. Error msg was {failure} Original exception on remote side was "
            f"{text}"
        ) from failure
    raise error


# Profiles


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name under which the profiler shows a call."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
