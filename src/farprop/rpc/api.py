"""Calls between workers and the shutdown: the names of ``torch.distributed.rpc.api``."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Generic, ParamSpec, TypeVar, TypeVarTuple, overload

import torch

from farprop._torch import ScriptFunction, find_builtin, is_legacy_profile, profiler_enabled, qualified_name
from farprop.errors import FarpropError, UsageError
from farprop.ids import WorkerInfo
from farprop.protocol.gather import Failure, Key
from farprop.protocol.quiescence import Quiescence, Report
from farprop.rpc import internal, saved_rrefs
from farprop.rpc._utils import _group_membership_management as _group_membership_management
from farprop.rpc._utils import _update_group_membership as _update_group_membership
from farprop.rpc.call_arguments import Args, Kwargs, Later, To, Variadic, args_of, kwargs_of
from farprop.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from farprop.rpc.inspection import LiveReference, live_references
from farprop.rpc.internal import PythonUDF, RPCExecMode, _build_rpc_profiling_key, _internal_rpc_pickler
from farprop.rpc.invocations import _invoke_remote_builtin as _invoke_remote_builtin
from farprop.rpc.invocations import _invoke_remote_python_udf as _invoke_remote_python_udf
from farprop.rpc.invocations import _invoke_remote_torchscript as _invoke_remote_torchscript
from farprop.rpc.invocations import _invoke_rpc_builtin as _invoke_rpc_builtin
from farprop.rpc.invocations import _invoke_rpc_python_udf as _invoke_rpc_python_udf
from farprop.rpc.invocations import _invoke_rpc_torchscript as _invoke_rpc_torchscript
from farprop.rpc.invocations import create
from farprop.rpc.options import checked_timeout
from farprop.rpc.retries import RetriedCall, Retry
from farprop.rpc.rref import RRef, T
from farprop.runtime import agent_registry, profiling
from farprop.runtime.agent import Agent
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.futures import Future
from farprop.runtime.gather import AllGatherStates, GatherCalls, Gathers, gather
from farprop.runtime.profiling import CallProfile, ProfiledFunction, RecordedFunction
from farprop.wire.message import SYSTEM

__all__ = [
    "AllGatherStates",
    "RRef",
    "get_worker_info",
    "method_factory",
    "new_method",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Ts = TypeVarTuple("_Ts")

logger = logging.getLogger(__name__)

_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_gathers = Gathers()
_ALL_WORKER_NAMES: set[str] = set()  # as they were when this worker joined
_ignore_rref_leak = True  # programs may set it to False; then leaked references are an error at shutdown

PyRRef = RRef
GenericWithOneTypeVar: Any = Generic[T]  # type: ignore[index]

_get_current_rpc_agent = current_agent
_is_current_rpc_agent_set = agent_registry.is_agent_set


def _require_initialized(func: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(func)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        current_agent()
        return func(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Encode calls with a pickler derived from ``internal._InternalRPCPickler``, inside the block."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """At the end of the block, wait for all futures that ``rpc_async`` returned in it on this thread."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures = _thread_local_var.future_list
        del _thread_local_var.future_list
        torch.futures.wait_all(futures)


# Start


def _init_rpc_states(agent: Any) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)
    snapshots = getattr(agent, "snapshots", None)  # agents of other backends have none
    if snapshots is not None:
        snapshots.references = live_references
        snapshots.barrier = _gathers.all_awaited


def _reset_gathers() -> None:
    """Forget the all-gathers of an earlier job. Call it before other workers can reach this one."""
    global _gathers
    _gathers = Gathers()


def _set_and_start_rpc_agent(agent: Any) -> None:
    agent_registry.set_agent(agent)


def _reset_current_rpc_agent() -> None:
    agent_registry.reset_agent()


# Workers


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """Get the ``WorkerInfo`` of a worker.

    Args:
        worker_name: Its name or rank. By default this worker.

    Returns:
        Its name and rank.

    Raises:
        UsageError: There is no such worker, or this process is not a worker.
    """
    return current_agent().get_worker_info(worker_name)


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from {to!r}: give a worker's name, rank or WorkerInfo.")


# Calls. ``call_arguments`` says what the overloads are for.


def _check_name(func: Any) -> None:
    """Raise ``TypeError`` unless ``func`` is a name in a restricted job, where a caller need not have the code."""
    if type(func) is not str or not current_agent().dialect.restricted:
        raise TypeError("function should be callable.")


# fmt: off
@overload
def rpc_sync(to: To, func: str, args: Args | None = None, kwargs: Kwargs | None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> Any: ...
@overload
def rpc_sync(to: To, func: Callable[..., Later[_R]], args: list[Any], kwargs: None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[..., _R], args: list[Any], kwargs: None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[..., Later[_R]], args: Args | None, kwargs: Kwargs,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[..., _R], args: Args | None, kwargs: Kwargs,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[..., Later[_R]], args: Args | None = None, *, kwargs: Kwargs,
             timeout: float = ..., retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[..., _R], args: Args | None = None, *, kwargs: Kwargs,
             timeout: float = ..., retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[[], Later[_R]], args: None = None, kwargs: None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[[], _R], args: None = None, kwargs: None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Variadic[Later[_R]], args: tuple[Any, ...], kwargs: None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Variadic[_R], args: tuple[Any, ...], kwargs: None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[[*_Ts], Later[_R]], args: tuple[*_Ts], kwargs: None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
@overload
def rpc_sync(to: To, func: Callable[[*_Ts], _R], args: tuple[*_Ts], kwargs: None = None,
             timeout: float = ..., *, retry: Retry | None = None) -> _R: ...
# fmt: on
@uncompiled
def rpc_sync(
    to: To,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retry: Retry | None = None,
) -> Any:
    """Run ``func(*args, **kwargs)`` on another worker and wait for its result.

    Args:
        to: The worker's name, rank or ``WorkerInfo``.
        func: A function, method, class, torch operator, TorchScript function, ``async def`` function or lambda. In a
            restricted job: a function that the worker has exposed, or its name.
        args: Positional arguments of ``func``.
        kwargs: Keyword arguments of ``func``.
        timeout: The seconds to wait, in all attempts; 0 disables the timeout. By default the process's default.
        retry: How often to try, if an attempt fails and it is safe to try again. By default the call is sent once, and
            runs at most once.

    Returns:
        What ``func`` returned.

    Raises:
        RpcTimeoutError: There was no answer in time.
        ConnectionLostError: The worker is gone.
        TypeError: ``args`` is no tuple or list, ``kwargs`` no dict, or ``func`` can't be called.
        UsageError: This process is not a worker, or there is no such worker.
        Exception: What ``func`` raised, as the same type.

    Example:
        ``y = rpc.rpc_sync("worker1", torch.add, args=(a, b))``
    """
    if retry is not None:
        return _retried(retry, to, func, args, kwargs, timeout).run()
    agent = agent_registry.installed
    if agent is None:
        agent = current_agent()  # raises
    if type(to) is not str:
        to = _to_worker_info(to)
    if not callable(func):
        _check_name(func)
    if type(args) is not tuple:
        args = () if args is None else args_of(args)
    if type(kwargs) is not dict:
        kwargs = {} if kwargs is None else kwargs_of(kwargs)
    seconds = agent.services.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
    if profiler_enabled() and not profiling.is_farprops_own:
        return _call_under_profiler(agent, to, func, args, kwargs, seconds)
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _pickled(func, args, kwargs)
    return agent.call_sync(to, func, args, kwargs, seconds)


# fmt: off
@overload
def rpc_async(to: To, func: str, args: Args | None = None, kwargs: Kwargs | None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[Any]: ...
@overload
def rpc_async(to: To, func: Callable[..., Later[_R]], args: list[Any], kwargs: None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[..., _R], args: list[Any], kwargs: None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[..., Later[_R]], args: Args | None, kwargs: Kwargs,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[..., _R], args: Args | None, kwargs: Kwargs,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[..., Later[_R]], args: Args | None = None, *, kwargs: Kwargs,
              timeout: float = ..., retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[..., _R], args: Args | None = None, *, kwargs: Kwargs,
              timeout: float = ..., retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[[], Later[_R]], args: None = None, kwargs: None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[[], _R], args: None = None, kwargs: None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Variadic[Later[_R]], args: tuple[Any, ...], kwargs: None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Variadic[_R], args: tuple[Any, ...], kwargs: None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[[*_Ts], Later[_R]], args: tuple[*_Ts], kwargs: None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
@overload
def rpc_async(to: To, func: Callable[[*_Ts], _R], args: tuple[*_Ts], kwargs: None = None,
              timeout: float = ..., *, retry: Retry | None = None) -> Future[_R]: ...
# fmt: on
@uncompiled
def rpc_async(
    to: To,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    retry: Retry | None = None,
) -> Future[Any]:
    """Run ``func(*args, **kwargs)`` on another worker and return a future of its result at once.

    Don't change tensors in the arguments before the future is done: large ones may not be sent yet.

    Args:
        to: The worker's name, rank or ``WorkerInfo``.
        func: A function, method, class, torch operator, TorchScript function, ``async def`` function or lambda. In a
            restricted job: a function that the worker has exposed, or its name.
        args: Positional arguments of ``func``.
        kwargs: Keyword arguments of ``func``.
        timeout: The seconds after which the future fails; 0 disables the timeout. By default the process's default.
        retry: As for :func:`rpc_sync`.

    Returns:
        A future of what ``func`` returns. It raises what :func:`rpc_sync` would raise.

    Raises:
        TypeError: ``args`` is no tuple or list, ``kwargs`` no dict, or ``func`` can't be called.
        UsageError: This process is not a worker, or there is no such worker.

    Example:
        ``future = rpc.rpc_async("worker1", torch.add, args=(a, b))``, then ``future.wait()``
    """
    if retry is None:
        future = _invoke_rpc(to, func, RPCExecMode.ASYNC, args, kwargs, timeout)
    else:
        call = _retried(retry, to, func, args, kwargs, timeout)
        future = call.future_of(lambda left: _invoke_rpc(to, func, RPCExecMode.ASYNC, args, kwargs, left))
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def _note_futures(futures: Sequence[torch.futures.Future[Any]]) -> None:
    """Have ``_wait_all`` wait for these, too."""
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.extend(futures)


def _retried(retry: Retry, to: Any, func: Any, args: Any, kwargs: Any, timeout: float) -> RetriedCall:
    agent = current_agent()
    seconds = agent.services.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
    return RetriedCall(agent, retry, func, seconds, lambda left: rpc_sync(to, func, args, kwargs, left))


def _invoke_rpc(
    to: To,
    func: Callable[..., Any] | str,
    rpc_type: RPCExecMode,
    args: Any = None,
    kwargs: Any = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Future:
    """Start a call for which ``_wait_all`` does not wait. ``rpc_type`` is its type in profiles."""
    agent = current_agent()
    if type(to) is not str:
        to = _to_worker_info(to)
    if not callable(func):
        _check_name(func)
    if type(args) is not tuple:
        args = () if args is None else args_of(args)
    if type(kwargs) is not dict:
        kwargs = {} if kwargs is None else kwargs_of(kwargs)
    seconds = agent.services.rpc_timeout if rpc_timeout == UNSET_RPC_TIMEOUT else checked_timeout(rpc_timeout)
    is_profiled = profiler_enabled() and not profiling.is_farprops_own
    profile = _profile_of(agent, rpc_type, to, func) if is_profiled else None
    future = Future()
    try:
        if _default_pickler is not _internal_rpc_pickler:
            func, args, kwargs = _pickled(func, args, kwargs)
        agent.call_async(to, func, args, kwargs, seconds, future, 0, profile)
    except BaseException:
        _end_event(profile)
        raise
    return future


def _call_under_profiler(agent: Agent, to: Any, func: Any, args: Any, kwargs: Any, seconds: float | None) -> Any:
    if profiling.session() is not None:
        return _invoke_rpc(to, func, RPCExecMode.SYNC, args, kwargs, seconds or 0.0).wait()
    profile = _profile_of(agent, RPCExecMode.SYNC, to, func)
    try:
        if _default_pickler is not _internal_rpc_pickler:
            func, args, kwargs = _pickled(func, args, kwargs)
        return agent.call_sync(to, func, args, kwargs, seconds)
    finally:
        _end_event(profile)


def _profile_of(agent: Agent, mode: RPCExecMode, to: Any, func: Any) -> CallProfile:
    """The call's part in the profile of torch's that this thread is under."""
    key = _profiling_key(agent, mode, to, func)
    session = profiling.session()
    return RecordedFunction(key) if session is None else ProfiledFunction(session, key, agent.get_worker_info().id)


def _end_event(profile: CallProfile | None) -> None:
    """An event without an end would spoil the profile."""
    if isinstance(profile, RecordedFunction):
        profile.add(None)


def _profiling_key(agent: Agent, mode: RPCExecMode, to: Any, func: Any) -> str:
    shown = find_builtin(func)
    if shown is None and isinstance(func, ScriptFunction):
        shown = qualified_name(func)
    elif shown is None:
        shown = getattr(func, "__qualname__", type(func).__qualname__)
    return _build_rpc_profiling_key(mode, shown, agent.get_worker_info().name, agent.get_worker_info(to).name)


def _pickled(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Encode a call with the program's own pickler. Operators and script functions are not encoded with it."""
    is_script = isinstance(getattr(func, "_wrapped_async_rpc_function", func), ScriptFunction)
    if is_script or find_builtin(func) is not None:
        return func, args, kwargs
    pickled = _default_pickler.serialize(PythonUDF(func, args, kwargs))
    is_async = hasattr(func, "_wrapped_async_rpc_function")
    return internal.run_pickled_async if is_async else internal.run_pickled, pickled, {}


# fmt: off
@overload
def remote(to: To, func: str, args: Args | None = None, kwargs: Kwargs | None = None,
           timeout: float = ...) -> RRef[Any]: ...
@overload
def remote(to: To, func: Callable[..., Later[_R]], args: list[Any], kwargs: None = None,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[..., _R], args: list[Any], kwargs: None = None, timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[..., Later[_R]], args: Args | None, kwargs: Kwargs,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[..., _R], args: Args | None, kwargs: Kwargs, timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[..., Later[_R]], args: Args | None = None, *, kwargs: Kwargs,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[..., _R], args: Args | None = None, *, kwargs: Kwargs,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[[], Later[_R]], args: None = None, kwargs: None = None,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[[], _R], args: None = None, kwargs: None = None,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Variadic[Later[_R]], args: tuple[Any, ...], kwargs: None = None,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Variadic[_R], args: tuple[Any, ...], kwargs: None = None,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[[*_Ts], Later[_R]], args: tuple[*_Ts], kwargs: None = None,
           timeout: float = ...) -> RRef[_R]: ...
@overload
def remote(to: To, func: Callable[[*_Ts], _R], args: tuple[*_Ts], kwargs: None = None,
           timeout: float = ...) -> RRef[_R]: ...
# fmt: on
@uncompiled
def remote(
    to: To,
    func: Callable[..., Any] | str,
    args: Any = None,
    kwargs: Any = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on a worker that keeps the result, and return a reference to it at once.

    Args:
        to: The worker's name, rank or ``WorkerInfo``.
        func: A function, method, class, torch operator, TorchScript function, ``async def`` function or lambda. In a
            restricted job: a function that the worker has exposed, or its name.
        args: Positional arguments of ``func``.
        kwargs: Keyword arguments of ``func``.
        timeout: The seconds that the worker may take to create the value; 0 disables the timeout. By default the
            process's default. After that every use of the reference raises ``RpcTimeoutError``.

    Returns:
        A reference to the result. Its ``to_here`` raises what ``func`` raised.

    Raises:
        TypeError: ``args`` is no tuple or list, ``kwargs`` no dict, or ``func`` can't be called.
        UsageError: This process is not a worker, or there is no such worker.

    Example:
        ``rref = rpc.remote("worker1", torch.add, args=(a, b))``, then ``rref.to_here()``
    """
    if not callable(func):
        _check_name(func)
    args = args_of(args)
    if args and isinstance(func, ScriptFunction):
        _check_script_arguments(func, args)
    return _remote(to, func, args, kwargs_of(kwargs), timeout)


def _check_script_arguments(func: Any, args: tuple[Any, ...]) -> None:
    """Raise for too many arguments of a script function here, as torch does, not when the reference is used."""
    schema = func.schema
    if len(args) > len(schema.arguments):
        raise UsageError(
            f"{schema.name}() expected at most {len(schema.arguments)} argument(s) but received {len(args)} "
            f"argument(s). Declaration: {schema}"
        )


def _remote(
    to: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float, keep: Any = None
) -> RRef[Any]:
    """Like ``remote``, after its checks. ``keep`` is kept alive until the worker has answered."""
    agent = current_agent()
    if type(to) is not str:
        to = _to_worker_info(to).name
    is_profiled = profiler_enabled() and not profiling.is_farprops_own
    profile = _profile_of(agent, RPCExecMode.REMOTE, to, func) if is_profiled else None
    try:
        if _default_pickler is not _internal_rpc_pickler:
            func, args, kwargs = _pickled(func, args, kwargs)
        return create(to, func, args, kwargs, timeout, profile, keep)
    except BaseException:
        _end_event(profile)
        raise


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> Any:
    """On the owner: the type of a reference's value; with ``blocking=False`` a completed future of it."""
    kind = type(rref.local_value())
    if blocking:
        return kind
    future = Future()
    future.set_result(kind)
    return future


def _rref_typeof_on_user(rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """On other workers: the type of a reference's value, or a future of it."""
    return rref._get_type(timeout, blocking)


# Torch makes the methods of its RRef from those of a C++ class with these two.


def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """Make a function that calls a method of an RRef.

    Args:
        method_name: The name of the method.
        docstring: The docstring of the function.

    Returns:
        The function, which takes the RRef and the arguments of the method.
    """

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(RRef, method_name)(self, *args, **kwargs)

    method.__doc__ = docstring
    return method


new_method = method_factory("to_here", RRef.to_here.__doc__ or "")


def _get_should_profile() -> bool:
    """Whether this thread runs under a profiler that records calls."""
    return is_legacy_profile()


def get_rpc_timeout() -> float:
    """Get the process's default timeout of calls.

    Returns:
        The timeout in seconds; 0 means no timeout.
    """
    return current_agent().rpc_timeout or 0.0


def _set_rpc_timeout(timeout: float) -> None:
    """Set the process's default timeout in seconds; 0 disables it. Calls under way keep theirs."""
    current_agent().rpc_timeout = checked_timeout(timeout)


# All-gathers. Other workers call the next three functions by name.


def _gather_to_leader(sequence_id: tuple[Any, ...], worker_name: str, obj: Any) -> None:
    _gathers.on_value(Key.of(sequence_id), worker_name, obj)


def _broadcast_to_followers(sequence_id: tuple[Any, ...], objects_map: dict[str, Any]) -> None:
    _gathers.on_broadcast(Key.of(sequence_id), objects_map)


def _release_follower(sequence_id: tuple[Any, ...], failure: tuple[Any, ...] | None) -> None:
    _gathers.on_release(Key.of(sequence_id), None if failure is None else Failure.of(failure))


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Exchange objects: returns every worker's ``obj`` by worker name. All of ``worker_names`` have to call it.

    The worker whose name sorts first is the leader. The others return only after the leader has all objects, because
    they often call it next.
    """
    return _gather(obj, worker_names, timeout)


def _gather(obj: Any, worker_names: Iterable[str] | None, timeout: float, flags: int = 0) -> dict[str, Any]:
    agent = current_agent()
    names = set(worker_names or (info.name for info in agent.get_worker_infos()))
    calls = GatherCalls(_gather_to_leader, _broadcast_to_followers, _release_follower)
    # Without a timeout of its own, a gather waits for slow workers for ever. Its calls have the timeout of calls.
    is_unset = timeout == UNSET_RPC_TIMEOUT
    limit = None if is_unset else checked_timeout(timeout)
    return gather(agent, _gathers, obj, names, limit, agent.rpc_timeout if is_unset else limit, calls, flags)


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of ``worker_names`` have called this."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Worker %s: failed to complete barrier", current_agent().get_worker_info().name)


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until every worker of the job has called this."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.error("Worker %s: not all workers called shutdown", current_agent().get_worker_info().name)
        raise


# Shutdown


def _delete_all_user_and_unforked_owner_rrefs(timeout: timedelta = timedelta(seconds=100)) -> None:
    """Drop all references of this worker to values of other workers. Using one raises from now on.

    Args:
        timeout: Accepted and ignored. Torch waits for unconfirmed references; farprop need not.
    """
    current_agent().references.users.drop_all()


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """Drop this worker's references; raise, or only warn, if others still refer to its values."""
    agent = current_agent()
    leaks: list[LiveReference] = []
    _note_owned(leaks)
    _delete_all_user_and_unforked_owner_rrefs()
    _report_leaks(agent, leaks, ignore_rref_leak)


def _cleanup_python_rpc_handler() -> None:
    """Do nothing. Torch releases Python objects here that its C++ code holds."""


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the job and stop farprop on this worker. After it ``init_rpc`` can be called again.

    Args:
        graceful: Whether to wait until every worker has called ``shutdown`` and all work of the job is done. Otherwise
            this worker stops at once, and its open calls and those of its callers fail.
        timeout: The seconds to wait for the others, in all; 0 disables the timeout. To stop takes less than a second
            more.

    Raises:
        ConnectionLostError: A worker died. This worker is shut down nevertheless.
        RpcTimeoutError: The others did not finish in time. This worker is shut down nevertheless.
        UsageError: This process is not a worker.
    """
    agent = current_agent()
    seconds = checked_timeout(timeout)
    deadline = None if seconds is None else time.monotonic() + seconds
    watch = getattr(agent, "watch", None)  # agents of other backends have none
    if watch is not None:
        watch.close()  # before the others leave
    inspector = getattr(agent, "inspector", None)
    if inspector is not None and graceful:
        inspector.on_shutdown()
    failure = sys.exception()  # ``shutdown`` in a ``finally`` clause
    if failure is not None:
        _tell_failure(agent, failure)
    streams = getattr(agent, "streams", None)
    if streams is not None and graceful:
        streams.close_unawaited()
    try:
        if graceful:
            if getattr(agent, "is_static_group", True):
                _wait_all_workers(timeout)
                _drain_work(agent, _left(deadline))  # work may still use references
                _delete_all_user_and_unforked_owner_rrefs()
                leaks: list[LiveReference] = []
                # References are counted before the last round, because after it the others leave.
                _wait_for_all_work(agent, _left(deadline), lambda: _note_owned(leaks))
                _report_leaks(agent, leaks, _ignore_rref_leak)
            else:
                _wait_for_own_work(agent, timeout)
                agent.leave()
    finally:
        if failure is not None:
            _tell_failure(agent, failure)  # again: others may have joined, or have come to know this worker
        _stop(deadline)


def _tell_failure(agent: Agent, failure: BaseException) -> None:
    if hasattr(agent, "tell_failure"):  # agents of other backends have none
        agent.tell_failure(failure)


def _left(deadline: float | None) -> float:
    """The timeout of what has to end at a deadline; 0 is none."""
    return 0.0 if deadline is None else max(0.001, deadline - time.monotonic())


def _note_owned(found: list[LiveReference]) -> None:
    """Note which values of this worker others refer to now."""
    found[:] = [reference for reference in live_references() if reference.role == "owner"]


def _report_leaks(agent: Agent, leaks: list[LiveReference], ignore: bool) -> None:
    """Log or raise which values of this worker other workers still refer to."""
    if not leaks:
        return
    lines = "\n".join(f"  {leak}" for leak in leaks)
    report = f"Leaking RRefs: other workers still refer to values of {agent.get_worker_info().name}.\n{lines}"
    if ignore:
        logger.warning(report)
        return
    raise UsageError(report.replace("Leaking RRefs:", "Leaking RRef:", 1))


def _finalize_shutdown() -> None:
    """Stop farprop on this worker."""
    _stop(None)


def _stop(deadline: float | None) -> None:
    """Stop farprop. In the main thread, another thread does it: an interrupt ends the wait, but not the shutdown."""
    agent = current_agent()
    if threading.current_thread() is not threading.main_thread():
        _stop_agent(agent, deadline)
        return
    errors: list[BaseException] = []
    args = (agent, deadline, errors)
    stopping = threading.Thread(target=_stop_noting, args=args, name="farprop-shutdown", daemon=True)
    stopping.start()
    stopping.join()
    if errors:
        raise errors[0]


def _stop_noting(agent: Agent, deadline: float | None, errors: list[BaseException]) -> None:
    try:
        _stop_agent(agent, deadline)
    except BaseException as error:
        errors.append(error)


def _stop_agent(agent: Agent, deadline: float | None) -> None:
    _reset_current_rpc_agent()
    agent.shutdown(deadline)
    saved_rrefs.release_all()


def _wait_for_all_work(agent: Agent, timeout: float, before_round: Callable[[], None] | None = None) -> None:
    """Exchange reports in rounds until all workers agree that no work is left."""
    deadline = time.monotonic() + timeout if timeout else None
    quiescence = Quiescence()
    while True:
        _poll_until(lambda: agent.idle, 0.05)
        report = Report(agent.peers.requests_sent, agent.idle)
        if before_round is not None:
            before_round()
        reports = _gather(tuple(report), None, _left(deadline), SYSTEM)
        if quiescence.round({worker: Report.of(found) for worker, found in reports.items()}):
            return


def _drain_work(agent: Agent, timeout: float) -> None:
    """Like ``_wait_for_all_work``, but only log an error, for example if a worker is gone."""
    try:
        _wait_for_all_work(agent, timeout)
    except FarpropError as error:
        logger.warning(
            "Worker %s: not all work of the job had ended at shutdown: %s", agent.get_worker_info().name, error
        )


def _wait_for_own_work(agent: Agent, timeout: float) -> None:
    """Wait until this worker has no work left."""
    deadline = time.monotonic() + timeout if timeout else None
    while not _poll_until(lambda: agent.idle, 0.05):
        if deadline is not None and time.monotonic() > deadline:
            raise UsageError(f"Calls of this worker are still under way {timeout:.1f} s after shutdown was called.")


def _poll_until(ready: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``ready()``, but not longer than ``seconds``; returns whether it is."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def _get_debug_info() -> dict[str, Any]:
    """Counters of this worker: strings, except for those of passes and contexts, which are ints."""
    agent = current_agent()
    return {**_rref_context_get_debug_info(), **agent.get_debug_info(), **agent.gradients.debug_info()}


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counts of this worker's references as strings, under torch's names."""
    counts = current_agent().references.counts()
    return {
        key: str(counts[key]) for key in ("num_owner_rrefs", "num_forks", "num_pending_users", "num_pending_futures")
    }


def _set_profiler_node_id(node_id: int) -> None:
    """Set the node id under which profiles show this worker's events. ``init_rpc`` sets it to the rank."""
    profiling.own_node_id = node_id


def enable_gil_profiling(flag: bool) -> None:
    """Measure how long pool threads wait for the GIL. The agent's debug info shows it.

    Args:
        flag: Whether to measure.
    """
    current_agent().profile_gil(flag)
