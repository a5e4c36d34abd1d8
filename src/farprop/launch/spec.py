"""What a process needs to know to join a pool, and how it joins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

import farprop.rpc as rpc
from farprop.config import Settings
from farprop.errors import RendezvousError, UsageError
from farprop.rpc import api
from farprop.rpc.agent import TensorPipeAgent
from farprop.rpc.backend_registry import _start
from farprop.rpc.constants import DEFAULT_RPC_TIMEOUT_SEC
from farprop.rpc.options import TensorPipeRpcBackendOptions
from farprop.runtime import agent_registry
from farprop.runtime.agent_registry import current_agent

DRIVER = "driver"


@dataclass(frozen=True)
class WorkerSpec:
    """A worker of a pool: its name and rank, the store's address, and the pool's secret.

    Whoever has the secret can run code as the user who started the pool.
    """

    name: str
    rank: int
    host: str
    port: int
    secret: str = field(repr=False)


def join(spec: WorkerSpec, on_driver_ended: Callable[[], None], timeout: float = 60.0) -> None:
    """Make this process a worker of a pool. When it returns, the driver can call this worker.

    Args:
        spec: which worker it is.
        on_driver_ended: called once, on a thread of farprop's, when the driver has stopped the pool or has died. The
            process should end then.
        timeout: the seconds that the driver has to answer, and that a dead process with this name may take to be known
            as dead.

    Raises:
        RendezvousError: the driver can't be reached.
        UsageError: this process is a worker already.
    """
    try:
        store = dist.TCPStore(spec.host, spec.port, is_master=False, timeout=timedelta(seconds=timeout))
    except RuntimeError as error:
        raise RendezvousError(f"{spec.name} can't reach the driver at {spec.host}:{spec.port}: {error}") from error
    _pool_ended.append(on_driver_ended)  # first: the driver may stop the pool at any time
    enter(store, spec, timeout)
    rpc.on_failure(DRIVER, lambda info, reason: end_pool())


_pool_ended: list[Callable[[], None]] = []


def expect_end() -> None:
    """The driver calls this on each worker before it ends the first: nobody takes that for a death."""
    current_agent().expect_end()


def end_pool() -> None:
    """The driver calls this on each worker when all expect it, and its death does the same."""
    while _pool_ended:
        _pool_ended.pop()()


def enter(store: dist.Store, spec: WorkerSpec, timeout: float = DEFAULT_RPC_TIMEOUT_SEC) -> None:
    """As ``join``, also for the driver, which has the store."""
    if agent_registry.is_agent_set():
        raise UsageError("This process is a worker already. Call farprop.rpc.shutdown first.")
    if Settings.from_env().restricted:
        raise UsageError("The workers of a pool run any function of its driver. Unset FARPROP_RESTRICTED.")
    api._reset_gathers()
    # By its address: options may outlive the pool, and must not keep its store.
    host = f"[{spec.host}]" if ":" in spec.host else spec.host
    # Joining may take as long as a call.
    options = TensorPipeRpcBackendOptions(init_method=f"tcp://{host}:{spec.port}", rpc_timeout=timeout)
    agent = TensorPipeAgent(store, spec.name, spec.rank, None, options, {}, [], pool_secret=spec.secret)
    api._init_rpc_states(_start(agent))
    api._set_rpc_timeout(DEFAULT_RPC_TIMEOUT_SEC)
