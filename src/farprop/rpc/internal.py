"""Names of torch's ``rpc.internal`` that programs use: its pickler, ``RemoteException``, and keys of profiles.

Farprop encodes calls and results with ``farprop.wire``, not with this pickler. The pickler is for programs that derive
their own from it (``_use_rpc_pickler``), which then encodes the calls of Python functions, and for programs that
register reducers for their classes.
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
from farprop.runtime.agent_registry import current_agent
from farprop.wire import codec

__all__ = ["PythonUDF", "RPCExecMode", "RemoteException", "deserialize", "serialize"]

_get_current_rpc_agent = current_agent
_pickler = pickle.Pickler
_unpickler = pickle.Unpickler

# The tensors and references that the pickle being written or read by this thread refers to by number.
_thread_local_tensor_tables = threading.local()


class RPCExecMode(enum.Enum):
    """How a call was made, for profiles."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A call of a Python function: the function and its arguments."""

    func: Any
    args: Any
    kwargs: Any


class RemoteException(NamedTuple):
    """An exception as ``_run_function`` returns it: its text with the traceback, and its type."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Pickles an object, with a table of the tensors in it.

    Derive from it to encode calls differently, and use the derived class with ``_use_rpc_pickler``.
    ``_dispatch_table`` has reducers by class, as in ``copyreg.dispatch_table``. The initial reducer of
    ``torch.Tensor`` puts tensors into the table; replace it to encode tensors differently.
    """

    def __init__(self) -> None:
        self._dispatch_table: dict[Any, Callable[[Any], Any]] = copyreg.dispatch_table.copy()
        self._dispatch_table[torch.Tensor] = self._tensor_reducer
        self._class_reducer_dict: dict[Any, Callable[[Any], Any]] = {}

    def _register_reducer(self, obj_class: type, reducer: Callable[[Any], Any]) -> None:
        """Reduce objects of a class with ``reducer(obj)``. The first reducer registered for a class stays."""
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
        """Pickle an object.

        Args:
            obj: The object.

        Returns:
            The pickle, and the table of tensors and references that it refers to by number.
        """
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
            # If plain pickle fails, the object is pickled again with cloudpickle, and the table starts empty again.
            return codec.encode_with(reducers, obj, table.clear), table
        finally:
            if outer is None:
                del tables.send_tables
            else:
                tables.send_tables = outer

    def deserialize(self, binary_data: bytes, tensor_table: list[Any]) -> Any:
        """Unpickle an object.

        Args:
            binary_data: The pickle.
            tensor_table: The table that belongs to it.

        Returns:
            The object, or an ``AttributeError`` if something in it is not defined on this worker.
        """
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
    """The table of the default pickler. What a program puts there applies to all calls and results."""

    def __setitem__(self, kind: Any, reducer: Callable[[Any], Any]) -> None:
        super().__setitem__(kind, reducer)
        codec.class_reducers[kind] = reducer


_internal_rpc_pickler = _InternalRPCPickler()
_internal_rpc_pickler._dispatch_table = _DefaultDispatchTable(_internal_rpc_pickler._dispatch_table)
_internal_rpc_pickler._class_reducer_dict = codec.class_reducers


def serialize(obj: Any) -> tuple[bytes, list[Any]]:
    """Pickle an object with the default pickler.

    Args:
        obj: The object.

    Returns:
        The pickle, and the table of tensors and references that it refers to by number.
    """
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[Any]) -> Any:
    """Unpickle an object with the default pickler.

    Args:
        binary_data: The pickle.
        tensor_table: The table that belongs to it.

    Returns:
        The object, or an ``AttributeError`` if something in it is not defined on this worker.
    """
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def send_along(obj: Any) -> int:
    """Put an object into the table of the pickle that this thread writes; returns its number."""
    table: list[Any] = _thread_local_tensor_tables.send_tables
    table.append(obj)
    return len(table) - 1


def is_serializing() -> bool:
    """Whether this thread is writing a pickle with a table."""
    return hasattr(_thread_local_tensor_tables, "send_tables")


# These run on the callee.


def run_pickled(binary_data: bytes, tensor_table: list[Any]) -> Any:
    """Run a call that the program's own pickler has encoded."""
    call = deserialize(binary_data, tensor_table)
    if isinstance(call, AttributeError):
        raise call
    return call.func(*call.args, **call.kwargs)


@async_execution
def run_pickled_async(binary_data: bytes, tensor_table: list[Any]) -> Any:
    """Run such a call of a function that is decorated with ``async_execution``."""
    return run_pickled(binary_data, tensor_table)


def _run_function(python_udf: Any) -> Any:
    """Run a call. Print an exception that it raises, and return it as a ``RemoteException``."""
    try:
        if isinstance(python_udf, AttributeError):
            raise python_udf
        return python_udf.func(*python_udf.args, **python_udf.kwargs)
    except Exception as error:
        text = f"On {current_agent().get_worker_info()}:\n{error!r}\n{traceback.format_exc()}"
        print(text, file=sys.stderr)
        return RemoteException(text, type(error))


def _handle_exception(result: Any) -> None:
    """Raise the exception that a ``RemoteException`` stands for; ignore any other result."""
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
    """The name of a call in profiles."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
