"""Calls one level below ``rpc_async`` and ``remote``, under the names of torch's C++ functions.

The called function is named (an operator or a compiled function that every worker has), or is already pickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from farprop._torch import compilation_unit, get_operation
from farprop.errors import UsageError
from farprop.ids import WorkerInfo
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.functions import async_execution
from farprop.rpc.internal import run_pickled, run_pickled_async
from farprop.rpc.options import checked_timeout
from farprop.rpc.rref import RRef, call_site
from farprop.runtime import checkpoint_regions
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.checkpoint_regions import region_here
from farprop.runtime.futures import Future
from farprop.runtime.profiling import CallProfile


def start(to: str, function: Any, args: tuple[Any, ...], timeout: float) -> Future:
    """Call a function on a worker; returns a future of its result."""
    agent = current_agent()
    future = Future()
    seconds = agent.services.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
    agent.call_async(to, function, args, {}, seconds, future)
    return future


def create(
    to: str,
    function: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    timeout: float,
    profile: CallProfile | None = None,
    keep: Any = None,
) -> RRef[Any]:
    """Call a function on a worker, which keeps the result. ``keep`` is kept alive until the worker has answered."""
    if checkpoint_regions.is_used and (region := region_here()) is not None:
        again = partial(create, to, function, args, kwargs, timeout, profile, keep)
        return region.run(f"remote() to {to}", again)
    agent = current_agent()
    seconds = agent.services.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
    call = agent.remote(to, function, args, kwargs, seconds, call_site(), profile, keep)
    item = call.item
    assert item is not None
    rref = RRef._of(item, agent.references, to, call)
    call.item = None  # the program has it now
    return rref


def _invoke_rpc_builtin(
    dst: WorkerInfo, op_name: str, rpc_timeout: float, /, *args: Any, **kwargs: Any
) -> torch.futures.Future[Any]:
    """Call an operator by name, for example ``aten::add``."""
    return start(dst.name, run_builtin, (op_name, args, kwargs), rpc_timeout)


def _invoke_rpc_python_udf(
    dst: WorkerInfo, pickled: bytes, tensors: Sequence[Any], rpc_timeout: float, is_async_execution: bool, /
) -> torch.futures.Future[Any]:
    """Call a ``PythonUDF`` that ``internal.serialize`` has pickled."""
    run = run_pickled_async if is_async_execution else run_pickled
    return start(dst.name, run, (pickled, list(tensors)), rpc_timeout)


def _invoke_rpc_torchscript(
    dst_worker_name: str,
    qualified_name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rpc_timeout: float,
    is_async_execution: bool,
    /,
) -> torch.futures.Future[Any]:
    """Call a compiled function of the worker by name."""
    run = run_script_async if is_async_execution else run_script
    return start(dst_worker_name, run, (qualified_name, args, kwargs), rpc_timeout)


def _invoke_remote_builtin(
    dst: WorkerInfo, op_name: str, rpc_timeout: float, /, *args: Any, **kwargs: Any
) -> RRef[Any]:
    """Like ``_invoke_rpc_builtin``, but the worker keeps the result."""
    return create(dst.name, run_builtin, (op_name, args, kwargs), {}, rpc_timeout)


def _invoke_remote_python_udf(
    dst: WorkerInfo, pickled: bytes, tensors: Sequence[Any], rpc_timeout: float, is_async_execution: bool, /
) -> RRef[Any]:
    """Like ``_invoke_rpc_python_udf``, but the worker keeps the result."""
    run = run_pickled_async if is_async_execution else run_pickled
    return create(dst.name, run, (pickled, list(tensors)), {}, rpc_timeout)


def _invoke_remote_torchscript(
    dst_worker_name: str,
    qualified_name: str,
    rpc_timeout: float,
    is_async_execution: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> RRef[Any]:
    """Like ``_invoke_rpc_torchscript``, but the worker keeps the result."""
    run = run_script_async if is_async_execution else run_script
    return create(dst_worker_name, run, (qualified_name, args, kwargs), {}, rpc_timeout)


# These run on the callee.


def run_builtin(op_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the overload of an operator that fits these arguments."""
    operator, _ = get_operation(op_name)
    if operator is None:
        raise UsageError(f"There is no operator {op_name!r}. Give its whole name, such as 'aten::add'.")
    return operator(*args, **kwargs)


def run_script(qualified_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a compiled function of this worker."""
    function = compilation_unit.find_function(qualified_name)
    if function is None:
        raise UsageError(
            f"attempted to get undefined function {qualified_name}: this worker has not compiled a function of that "
            "name. Import the module that does."
        )
    return function(*args, **kwargs)


@async_execution
def run_script_async(qualified_name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a compiled function that returns a future."""
    return run_script(qualified_name, args, kwargs)
