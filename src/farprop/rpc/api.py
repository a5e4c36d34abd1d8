"""Calls between workers, under the names of ``torch.distributed.rpc.api``."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from farprop._torch import ScriptFunction, find_builtin, is_legacy_profile, profiler_enabled, qualified_name
from farprop.errors import FarpropError, UsageError
from farprop.ids import WorkerInfo
from farprop.protocol.gatherings import Failure, Key
from farprop.protocol.quiescence import Quiescence, Report
from farprop.rpc import internal, saved
from farprop.rpc._utils import _group_membership_management as _group_membership_management
from farprop.rpc._utils import _update_group_membership as _update_group_membership
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
from farprop.rpc.rref import RRef, T
from farprop.runtime import current, profiling
from farprop.runtime.agent import Agent
from farprop.runtime.current import current_agent
from farprop.runtime.futures import Future
from farprop.runtime.gather import AllGatherStates, Calls, Gatherings, gather
from farprop.runtime.profiling import Session
from farprop.runtime.uncompiled import uncompiled
from farprop.wire.frames import SYSTEM

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

logger = logging.getLogger("farprop.rpc")

_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_gatherings = Gatherings()
_ALL_WORKER_NAMES: set[str] = set()  # as they were when this worker joined
_ignore_rref_leak = True  # a program may set it to False: then leaks are an error at shutdown

PyRRef = RRef
GenericWithOneTypeVar: Any = Generic[T]  # type: ignore[index]

_get_current_rpc_agent = current_agent
_is_current_rpc_agent_set = current.is_agent_set


def _require_initialized(func: Callable[_P, _R]) -> Callable[_P, _R]:
    @functools.wraps(func)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        current_agent()
        return func(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Encode calls with another pickler, derived from ``internal._InternalRPCPickler``."""
    global _default_pickler
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end of the block for all futures that ``rpc_async`` returned in it, on this thread."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        futures = _thread_local_var.future_list
        del _thread_local_var.future_list
        torch.futures.wait_all(futures)


# Starting


def _init_rpc_states(agent: Any) -> None:
    global _ALL_WORKER_NAMES
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not _is_current_rpc_agent_set():
        _set_and_start_rpc_agent(agent)


def _forget_gatherings() -> None:
    """Before a worker can be reached: a word of a faster worker may come before init_rpc has returned here."""
    global _gatherings
    _gatherings = Gatherings()


def _set_and_start_rpc_agent(agent: Any) -> None:
    current.set_agent(agent)


def _reset_current_rpc_agent() -> None:
    current.reset_agent()


# Who is who


@_require_initialized
def get_worker_info(worker_name: str | int | None = None) -> WorkerInfo:
    """The ``WorkerInfo`` of the worker with this name (or id); of this worker if none is given."""
    return current_agent().get_worker_info(worker_name)


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from {to!r}: give a worker's name, rank or WorkerInfo.")


# Calls


def _check_name(func: Any) -> None:
    """What is called may be a name in a restricted job, whose workers need not have each other's code."""
    if type(func) is not str or not current_agent().dialect.restricted:
        raise TypeError("function should be callable.")


@uncompiled
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any] | str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Run ``func(*args, **kwargs)`` on worker ``to`` and return its result.

    Args:
        to: the worker's name, rank or ``WorkerInfo``.
        func: a function, method, class, torch operator, TorchScript function, ``async def`` function or lambda. In a
            restricted job: what the worker has exposed, or its name.
        timeout: seconds to wait for the result; 0 for ever. Unset, the process's default holds.

    Raises what ``func`` raised, as its own type; ``RpcTimeoutError`` when there is no answer in time;
    ``ConnectionLostError`` when the worker is gone.
    """
    agent = current_agent()
    if type(to) is not str:
        to = _to_worker_info(to)
    if not callable(func):
        _check_name(func)
    if timeout != UNSET_RPC_TIMEOUT:
        timeout = checked_timeout(timeout)
    if profiler_enabled() and (session := profiling.session()) is not None:
        return _call_profiled(agent, session, RPCExecMode.SYNC, to, func, args, kwargs, timeout).wait()
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _pickled(func, args, kwargs)
    return agent.call_sync(to, func, tuple(args) if args else (), kwargs or {}, timeout)


@uncompiled
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any] | str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to``; returns a future of its result at once.

    Arguments are as for :func:`rpc_sync`. Don't change the tensors in ``args`` before the future is done: large ones
    may still be on their way.
    """
    future = _invoke_rpc(to, func, RPCExecMode.ASYNC, args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def _invoke_rpc(
    to: str | int | WorkerInfo,
    func: Callable[..., Any] | str,
    rpc_type: RPCExecMode,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> Future:
    """A call whose future ``_wait_all`` does not wait for. ``rpc_type`` is what profiles call it."""
    agent = current_agent()
    if type(to) is not str:
        to = _to_worker_info(to)
    if not callable(func):
        _check_name(func)
    if rpc_timeout != UNSET_RPC_TIMEOUT:
        rpc_timeout = checked_timeout(rpc_timeout)
    if profiler_enabled() and (session := profiling.session()) is not None:
        return _call_profiled(agent, session, rpc_type, to, func, args, kwargs, rpc_timeout)
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _pickled(func, args, kwargs)
    future = Future()
    agent.call_async(to, func, tuple(args) if args else (), kwargs or {}, rpc_timeout, future)
    return future


def _call_profiled(
    agent: Agent, session: Session, mode: RPCExecMode, to: Any, func: Any, args: Any, kwargs: Any, timeout: float
) -> Future:
    key = _profiling_key(agent, mode, to, func)
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _pickled(func, args, kwargs)
    future = Future()
    agent.call_profiled(to, func, tuple(args) if args else (), kwargs or {}, timeout, future, session, key)
    return future


def _profiling_key(agent: Agent, mode: RPCExecMode, to: Any, func: Any) -> str:
    shown = find_builtin(func)
    if shown is None and isinstance(func, ScriptFunction):
        shown = qualified_name(func)
    elif shown is None:
        shown = getattr(func, "__qualname__", type(func).__qualname__)
    return _build_rpc_profiling_key(mode, shown, agent.get_worker_info().name, agent.get_worker_info(to).name)


def _pickled(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A call as the program's own pickler encodes it. Operators and script functions don't go through it."""
    is_script = isinstance(getattr(func, "_wrapped_async_rpc_function", func), ScriptFunction)
    if is_script or find_builtin(func) is not None:
        return func, args, kwargs
    pickled = _default_pickler.serialize(PythonUDF(func, args or (), kwargs or {}))
    is_async = hasattr(func, "_wrapped_async_rpc_function")
    return internal.run_pickled_async if is_async else internal.run_pickled, pickled, {}


@uncompiled
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any] | str,
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Run ``func(*args, **kwargs)`` on worker ``to``, which keeps the result; returns a reference to it at once.

    Arguments are as for :func:`rpc_sync`. What ``func`` raises comes at ``to_here``. ``timeout`` is how long the worker
    may take to make the value; after that, every use of the reference raises ``RpcTimeoutError``.
    """
    if not callable(func):
        _check_name(func)
    if args and isinstance(func, ScriptFunction):
        _check_script_arguments(func, args)
    return _remote(to, func, tuple(args) if args else (), kwargs or {}, timeout)


def _check_script_arguments(func: Any, args: tuple[Any, ...]) -> None:
    """Too many arguments of a script function are noticed here, as by torch, and not when the reference is used."""
    schema = func.schema
    if len(args) > len(schema.arguments):
        raise UsageError(
            f"{schema.name}() expected at most {len(schema.arguments)} argument(s) but received {len(args)} "
            f"argument(s). Declaration: {schema}"
        )


def _remote(
    to: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], timeout: float, keep: Any = None
) -> RRef[Any]:
    """``keep`` lives until the worker has answered."""
    agent = current_agent()
    if type(to) is not str:
        to = _to_worker_info(to).name
    profile = None
    if profiler_enabled() and (session := profiling.session()) is not None:
        profile = session, _profiling_key(agent, RPCExecMode.REMOTE, to, func)
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _pickled(func, args, kwargs)
    return create(to, func, args, kwargs, timeout, profile, keep)


def _rref_typeof_on_owner(rref: RRef[Any], blocking: bool = True) -> Any:
    """On the owner: the type of a reference's value; with ``blocking=False`` a future that has it."""
    kind = type(rref.local_value())
    if blocking:
        return kind
    future = Future()
    future.set_result(kind)
    return future


def _rref_typeof_on_user(rref: RRef[Any], timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
    """Elsewhere: the type of a reference's value, or a future of it."""
    return rref._get_type(timeout, blocking)


# Torch makes the methods of its RRef by this, out of those of a C++ class, and leaves the last one behind.


def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """A function that calls the RRef's method of this name."""

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(RRef, method_name)(self, *args, **kwargs)

    method.__doc__ = docstring
    return method


new_method = method_factory("to_here", RRef.to_here.__doc__ or "")


def _get_should_profile() -> bool:
    """Whether this thread is under a profile that calls take part in."""
    return is_legacy_profile()


def get_rpc_timeout() -> float:
    """The process's default timeout of calls, in seconds; 0 is for none."""
    return current_agent().rpc_timeout


def _set_rpc_timeout(timeout: float) -> None:
    """Set the process's default timeout of calls, in seconds; 0 is for none. Calls under way keep theirs."""
    current_agent().rpc_timeout = checked_timeout(timeout)


# Gatherings. The next three run on other workers, found by name.


def _gather_to_leader(sequence_id: tuple[Any, ...], worker_name: str, obj: Any) -> None:
    _gatherings.hear(Key.of(sequence_id), worker_name, obj)


def _broadcast_to_followers(sequence_id: tuple[Any, ...], objects_map: dict[str, Any]) -> None:
    _gatherings.be_told(Key.of(sequence_id), objects_map)


def _release_follower(sequence_id: tuple[Any, ...], failure: tuple[Any, ...] | None) -> None:
    _gatherings.be_released(Key.of(sequence_id), None if failure is None else Failure.of(failure))


@_require_initialized
def _all_gather(
    obj: Any, worker_names: Iterable[str] | None = None, timeout: float = UNSET_RPC_TIMEOUT
) -> dict[str, Any]:
    """Every worker's ``obj`` by name, on every worker. All of ``worker_names`` (default: all) have to call it.

    The worker whose name sorts first lets the others go when it is through: what they do next is often to call it.
    """
    return _gather(obj, worker_names, timeout)


def _gather(obj: Any, worker_names: Iterable[str] | None, timeout: float, flags: int = 0) -> dict[str, Any]:
    agent = current_agent()
    names = set(worker_names or (info.name for info in agent.get_worker_infos()))
    calls = Calls(_gather_to_leader, _broadcast_to_followers, _release_follower)
    return gather(agent, _gatherings, obj, names, timeout, calls, flags)


@_require_initialized
def _barrier(worker_names: Iterable[str]) -> None:
    """Wait until all of ``worker_names`` are here."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until every worker of the job is here."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        logger.error("not all workers came to the shutdown")
        raise


# Ending


def _delete_all_user_and_unforked_owner_rrefs(timeout: timedelta = timedelta(seconds=100)) -> None:
    """Every reference that this worker has to a value of another one is dropped. Using it raises from now on.

    Args:
        timeout: how long torch's waits for those that are not confirmed. Here nothing has to be waited for.
    """
    current_agent().references.drop_all()


def _destroy_rref_context(ignore_rref_leak: bool) -> None:
    """Drop this worker's references, and say which values of its own others still refer to: raise, or warn."""
    agent = current_agent()
    leaks: list[LiveReference] = []
    _note_owned(leaks)
    _delete_all_user_and_unforked_owner_rrefs()
    _report_leaks(agent, leaks, ignore_rref_leak)


def _cleanup_python_rpc_handler() -> None:
    """Does nothing: torch lets go here of Python objects that its C++ code holds."""


@_require_initialized
def shutdown(graceful: bool = True, timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Leave the job and stop farprop on this worker. ``init_rpc`` may be called again after it.

    Args:
        graceful: wait until every worker has called ``shutdown`` and all work everywhere is done. If not, stop now:
            open calls fail, here and at those who called us.
        timeout: seconds to wait for the others; 0 as long as they live. A worker that died ends the wait with an
            error, and this worker is shut down all the same.
    """
    agent = current_agent()
    try:
        if graceful:
            if getattr(agent, "is_static_group", True):
                _wait_all_workers(timeout)
                _let_work_end(agent, timeout)  # which may still use references
                _delete_all_user_and_unforked_owner_rrefs()
                leaks: list[LiveReference] = []
                # After the last round the others leave, and what they held counts no more.
                _wait_for_all_work(agent, timeout, lambda: _note_owned(leaks))
                _report_leaks(agent, leaks, _ignore_rref_leak)
            else:
                _wait_for_own_work(agent, timeout)
                agent.leave()
    finally:
        _finalize_shutdown()


def _note_owned(found: list[LiveReference]) -> None:
    """Which values of this worker others refer to now."""
    found[:] = [reference for reference in live_references() if reference.role == "owner"]


def _report_leaks(agent: Agent, leaks: list[LiveReference], ignore: bool) -> None:
    """Nobody should refer to values here any more. If somebody does, say which, and whose."""
    if not leaks:
        return
    lines = "\n".join(f"  {leak}" for leak in leaks)
    report = f"Leaking RRefs: other workers still refer to values of {agent.get_worker_info().name}.\n{lines}"
    if ignore:
        logger.warning(report)
        return
    raise UsageError(report.replace("Leaking RRefs:", "Leaking RRef:", 1))


def _finalize_shutdown() -> None:
    agent = current_agent()
    _reset_current_rpc_agent()
    agent.shutdown()
    saved.forget()


def _wait_for_all_work(agent: Agent, timeout: float, before_round: Callable[[], None] | None = None) -> None:
    """Rounds of reports until all workers agree that nothing is left to do."""
    deadline = time.monotonic() + timeout if timeout else 0.0
    machine = Quiescence()
    while True:
        _pause_until(lambda: agent.idle, 0.05)
        left = max(0.001, deadline - time.monotonic()) if deadline else 0.0
        report = Report(agent.requests_sent, agent.idle)
        if before_round is not None:
            before_round()
        said = _gather(tuple(report), None, left, SYSTEM)
        if machine.round({worker: Report.of(word) for worker, word in said.items()}):
            return


def _let_work_end(agent: Agent, timeout: float) -> None:
    """As ``_wait_for_all_work``, but if a worker is gone, what is left to do is done without it."""
    try:
        _wait_for_all_work(agent, timeout)
    except FarpropError as error:
        logger.warning("not all work of the job has ended at shutdown: %s", error)


def _wait_for_own_work(agent: Agent, timeout: float) -> None:
    deadline = time.monotonic() + timeout if timeout else 0.0
    while not _pause_until(lambda: agent.idle, 0.05):
        if deadline and time.monotonic() > deadline:
            raise UsageError(f"Calls of this worker are still under way after {timeout:.1f} s of shutdown.")


def _pause_until(ready: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def _get_debug_info() -> dict[str, Any]:
    """What this worker is doing: text by key, but for the numbers of passes and contexts."""
    agent = current_agent()
    return {**_rref_context_get_debug_info(), **agent.get_debug_info(), **agent.gradients.debug_info()}


def _rref_context_get_debug_info() -> dict[str, str]:
    """Counts of this worker's references, as text, under torch's names."""
    counts = current_agent().references.counts()
    return {
        key: str(counts[key]) for key in ("num_owner_rrefs", "num_forks", "num_pending_users", "num_pending_futures")
    }


def _set_profiler_node_id(node_id: int) -> None:
    """The number under which profiles show what ran on this worker. ``init_rpc`` sets it to the worker's rank."""
    profiling.own_node_id = node_id


def enable_gil_profiling(flag: bool) -> None:
    """Measure how long pool threads wait for the interpreter's lock; shown in the agent's debug info."""
    current_agent().profile_gil(flag)
