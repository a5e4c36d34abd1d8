"""Calls between workers: a drop-in for ``torch.distributed.rpc``.

::

    import farprop.rpc as rpc
    rpc.init_rpc()  # in a program that `farprop run -n 2` has started; or with name, rank and world_size
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
from farprop.locks import make_lock
from farprop.rpc import api, backend_registry, constants, functions, internal, options
from farprop.rpc import store as stores
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
from farprop.rpc.functions import expose
from farprop.rpc.inspection import LiveReference, debug_info, live_references
from farprop.rpc.launchers import require_launched
from farprop.rpc.one_to_many import broadcast, gather, map
from farprop.rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions, _TensorPipeRpcBackendOptionsBase
from farprop.rpc.retries import Retry, idempotent
from farprop.rpc.rref import RRef
from farprop.rpc.saved_rrefs import _disable_jit_rref_pickle, _enable_jit_rref_pickle
from farprop.rpc.server_process_global_profiler import _server_process_global_profile
from farprop.rpc.streams import Stream, stream
from farprop.rpc.workers import on_failure, on_join, on_leave, wait_for_workers, workers
from farprop.runtime.agent import meeting_seconds
from farprop.runtime.rendezvous import attempt_of, is_launchers
from farprop.runtime.secret import check_settings
from farprop.runtime.watch import CallbackHandle

__all__ = [
    "AllGatherStates",
    "BackendType",
    "BackendValue",
    "CallbackHandle",
    "LiveReference",
    "RRef",
    "Retry",
    "RpcBackendOptions",
    "Stream",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "backend_registered",
    "broadcast",
    "construct_rpc_backend_options",
    "debug_info",
    "expose",
    "functions",
    "gather",
    "get_rpc_timeout",
    "get_worker_info",
    "idempotent",
    "init_backend",
    "init_rpc",
    "is_available",
    "live_references",
    "map",
    "method_factory",
    "new_method",
    "on_failure",
    "on_join",
    "on_leave",
    "register_backend",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "stream",
    "wait_for_workers",
    "workers",
]


def __dir__() -> list[str]:
    return __all__


_is_tensorpipe_available = True  # farprop's backend has that name

_init_counter_lock = make_lock("init_counter")
_init_counter = 0


def is_available() -> bool:
    """Whether RPC is available. Always true, unlike in some builds of torch.

    Returns:
        True.
    """
    return True


def init_rpc(
    name: str | None = None,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
    *,
    restricted: bool = False,
) -> None:
    """Make this process a worker of a job. When it returns, this worker can call others and be called.

    Args:
        name: The worker's name, unique in the job: letters, digits, ``_``, ``-`` and ``:``. Without it, it is
            ``worker`` and the rank, and what else is not given (the rank, the number of workers, the store's address)
            comes from the launcher: ``farprop run``, ``torchrun``, ``srun`` or ``mpirun``.
        backend: A member of ``BackendType``. By default farprop's own.
        rank: The worker's rank, unique in the job, from 0.
        world_size: The number of workers. The call returns when all have joined. With a name and without it, workers
            may join and leave at any time.
        rpc_backend_options: The number of threads, the default timeout, and how workers find each other.
        restricted: Whether other workers may only call functions with ``@farprop.rpc.expose`` and send only plain data;
            nothing is unpickled. It has to be the same on all workers. ``FARPROP_RESTRICTED=1`` has the same effect.

    Raises:
        UsageError: This process is a worker already, ``name`` or a setting in the environment is invalid, or there is
            no name and no launcher.
        TypeError: ``backend`` or ``rpc_backend_options`` has the wrong type.
        ValueError: ``rank``, ``init_method`` or a device map is invalid.
        RendezvousError: The store can't be reached, or other workers did not join in time.

    Example:
        ``rpc.init_rpc("worker0", rank=0, world_size=2)``
    """
    backend, chosen = _backend_and_options(backend, rpc_backend_options)
    if name is None:
        if rank == -1 or not world_size:
            launched = require_launched()
            rank = launched.rank if rank == -1 else rank
            world_size = world_size or launched.world_size
        name = f"worker{rank}"
    check_worker_name(name)
    if _is_current_rpc_agent_set():
        raise UsageError("RPC is already initialized. Call farprop.rpc.shutdown before init_rpc.")
    if world_size and rank != -1 and not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, but it is {rank}.")
    check_settings(Settings.from_env())
    global _init_counter
    with _init_counter_lock:
        timeout = meeting_seconds(chosen.rpc_timeout or None)
        store, rank, world_size = stores.open_store(chosen.init_method, rank, world_size, chosen, timeout)
        store = dist.PrefixStore(f"rpc_prefix_{_init_counter}", store)
        if world_size and is_launchers(store):
            store = dist.PrefixStore(attempt_of(store, rank, world_size, timeout), store)
        _init_rpc_backend(backend, store, name, rank, world_size, chosen, restricted)
        # Counted only on success, so that a worker that tries again finds those that still wait.
        _init_counter += 1


def _backend_and_options(backend: Any, given: RpcBackendOptions | None) -> tuple[Any, Any]:
    known = backend_registry.BackendType
    # Accept a member of an earlier BackendType: each registration makes a new enum.
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
    """Start a backend with a store that the caller has opened."""
    _validate_rpc_args(backend, store, name, rank, world_size, rpc_backend_options)
    if _is_current_rpc_agent_set():
        raise UsageError("RPC is already initialized. Call farprop.rpc.shutdown before init_rpc.")
    api._reset_gathers()
    agent = backend_registry.init_backend(
        backend,
        store=store,
        name=name,
        rank=rank,
        world_size=world_size,
        rpc_backend_options=rpc_backend_options,
        **({"restricted": True} if restricted else {}),  # other backends need not know this argument
    )
    api._init_rpc_states(agent)


def _validate_rpc_args(
    backend: Any, store: Any, name: Any, rank: Any, world_size: Any, rpc_backend_options: Any
) -> None:
    """Raise ``RuntimeError`` if an argument of ``_init_rpc_backend`` has the wrong type."""
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
