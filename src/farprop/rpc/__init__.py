"""Calls between workers: a drop-in for ``torch.distributed.rpc``.

::

    import farprop.rpc as rpc
    rpc.init_rpc("worker0", rank=0, world_size=2)
    y = rpc.rpc_sync("worker1", torch.add, args=(a, b))
    rpc.shutdown()
"""

from __future__ import annotations

import numbers
import threading
from typing import Any

import torch.distributed as dist

from farprop.config import Settings
from farprop.errors import UsageError
from farprop.ids import WorkerInfo, check_worker_name
from farprop.rpc import api, backend_registry, constants, functions, internal, meeting, options
from farprop.rpc.agent import RpcAgent, TensorPipeAgent
from farprop.rpc.api import (
    AllGatherStates,
    PyRRef,
    _all_gather,
    _barrier,
    _cleanup_python_rpc_handler,
    _delete_all_user_and_unforked_owner_rrefs,
    _destroy_rref_context,
    _get_current_rpc_agent,
    _get_debug_info,
    _invoke_remote_builtin,
    _invoke_remote_python_udf,
    _invoke_remote_torchscript,
    _invoke_rpc_builtin,
    _invoke_rpc_python_udf,
    _invoke_rpc_torchscript,
    _is_current_rpc_agent_set,
    _reset_current_rpc_agent,
    _rref_context_get_debug_info,
    _set_and_start_rpc_agent,
    _set_profiler_node_id,
    _set_rpc_timeout,
    _use_rpc_pickler,
    _wait_all,
    _wait_all_workers,
    enable_gil_profiling,
    get_rpc_timeout,
    get_worker_info,
    logger,
    method_factory,
    new_method,
    remote,
    rpc_async,
    rpc_sync,
    shutdown,
)
from farprop.rpc.backend_registry import (
    BackendType,
    BackendValue,
    backend_registered,
    construct_rpc_backend_options,
    init_backend,
    register_backend,
)
from farprop.rpc.constants import (
    _DEFAULT_INIT_METHOD,
    _DEFAULT_NUM_WORKER_THREADS,
    _DEFAULT_RPC_TIMEOUT_SEC,
    _UNSET_RPC_TIMEOUT,
)
from farprop.rpc.exposing import expose
from farprop.rpc.inspection import LiveReference, debug_info, live_references
from farprop.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions, _TensorPipeRpcBackendOptionsBase
from farprop.rpc.rref import RRef
from farprop.rpc.saved import _disable_jit_rref_pickle, _enable_jit_rref_pickle
from farprop.rpc.server_process_global_profiler import _server_process_global_profile
from farprop.runtime.agent import meeting_seconds
from farprop.runtime.secret import check_settings

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "LiveReference",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registered",
    "construct_rpc_backend_options",
    "debug_info",
    "expose",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_backend",
    "init_rpc",
    "is_available",
    "live_references",
    "method_factory",
    "new_method",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

_is_tensorpipe_available = True  # farprop's backend, under that name

_init_counter_lock = threading.Lock()
_init_counter = 0


def is_available() -> bool:
    """Whether this build can make calls. Farprop always can."""
    return True


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    restricted: bool = False,
) -> None:
    """Make this process a worker: it can call others and be called when this returns.

    Args:
        name: unique in the job; letters, digits, ``_``, ``-`` and ``:``.
        backend: a member of ``BackendType``; the default is farprop's own.
        rank: unique in the job, from 0.
        world_size: how many workers there are; this call returns when all have come. Without it, workers come and go.
        rpc_backend_options: threads, default timeout, and where workers meet.
        restricted: whether other workers may only call what has ``@farprop.rpc.expose``, with data: nothing that they
            send is unpickled. On all workers or on none. ``FARPROP_RESTRICTED=1`` is the same.
    """
    backend, chosen = _backend_and_options(backend, rpc_backend_options)
    check_worker_name(name)
    if _is_current_rpc_agent_set():
        raise UsageError("RPC is already initialized. Call farprop.rpc.shutdown before init_rpc.")
    if world_size and rank != -1 and not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, but it is {rank}.")
    check_settings(Settings.from_env())
    global _init_counter
    with _init_counter_lock:
        timeout = meeting_seconds(chosen.rpc_timeout)
        store, rank, world_size = meeting.open_store(chosen.init_method, rank, world_size, chosen, timeout)
        store = dist.PrefixStore(f"rpc_prefix_{_init_counter}", store)
        _init_rpc_backend(backend, store, name, rank, world_size, chosen, restricted)
        # Counted only when it worked: a worker that tries again meets those that still wait.
        _init_counter += 1


def _backend_and_options(backend: Any, given: RpcBackendOptions | None) -> tuple[Any, Any]:
    known = backend_registry.BackendType
    # A member of an earlier BackendType is as good: each registration makes a new one.
    if isinstance(getattr(backend, "value", None), BackendValue) and backend.name in known.__members__:
        backend = known[backend.name]
    if backend is not None and not isinstance(backend, known):
        raise TypeError("Argument backend must be a member of BackendType")
    if given is not None and not isinstance(given, RpcBackendOptions):
        raise TypeError("Argument rpc_backend_options must be an instance of RpcBackendOptions")
    if backend is None and given is not None:
        for candidate in known:
            if isinstance(given, type(construct_rpc_backend_options(candidate))):
                backend = candidate
                break
        else:
            raise TypeError(f"Could not infer backend for options {given}")
    if backend is None:
        backend = known["TENSORPIPE"]
    return backend, given if given is not None else construct_rpc_backend_options(backend)


def _init_rpc_backend(
    backend: Any = BackendType["TENSORPIPE"],
    store: Any = None,
    name: str | None = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: Any = None,
    restricted: bool = False,
) -> None:
    """Start a backend on a store that the caller has opened."""
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise UsageError("RPC is already initialized. Call farprop.rpc.shutdown before init_rpc.")
    api._forget_gatherings()
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
        **({"restricted": True} if restricted else {}),  # others' backends need not know of it
    )
    api._init_rpc_states(agent)


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    """Raises if one of them is of another type than ``_init_rpc_backend`` takes."""
    for argument, value, kind in (
        ("backend", backend, backend_registry.BackendType),
        ("store", store, dist.Store),
        ("name", name, str),
        ("rank", rank, numbers.Integral),
        ("world_size", world_size, (numbers.Integral, type(None))),
        ("rpc_backend_options", rpc_backend_options, RpcBackendOptions),
    ):
        if not isinstance(value, kind):
            raise RuntimeError(f"Argument {argument} must be of type {kind} but got {value!r}")
