"""Backends by name. Farprop's own is ``TENSORPIPE``, the name that programs written for torch ask for."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlparse

import torch.distributed as dist

from farprop.rpc import constants
from farprop.rpc.options import TensorPipeRpcBackendOptions
from farprop.runtime.agent import Agent, AgentOptions
from farprop.runtime.current import reset_agent, set_agent
from farprop.runtime.devices import portable
from farprop.transport.faulty import Judge

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


class BackendValue(NamedTuple):
    """What a backend brings: how to make its options, and how to make its agent."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


def _show(member: Any) -> str:
    return f"BackendType.{member.name}"


def _make_enum(members: dict[str, BackendValue]) -> Any:
    backend_type = enum.Enum("BackendType", members)  # type: ignore[misc]
    backend_type.__repr__ = _show  # type: ignore[method-assign]
    backend_type.__doc__ = "The registered backends. ``register_backend`` adds one."
    return backend_type


BackendType: Any = _make_enum({})


def backend_registered(backend_name: str) -> bool:
    """Whether a backend of this name exists."""
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Add a backend; returns its member of ``BackendType``, which is a new enum from then on."""
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_enum(members)
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: Any = constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """The options object of a backend."""
    return backend.value.construct_rpc_backend_options_handler(
        rpc_timeout=rpc_timeout, init_method=init_method, **kwargs
    )


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Start the agent of a backend."""
    return backend.value.init_backend_handler(*args, **kwargs)


def _init_own_backend(
    store: dist.Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: Any,
    judge: Judge | None = None,
) -> Agent:
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            f"`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, not {type(rpc_backend_options).__name__}."
        )
    agent = Agent(
        store,
        name,
        rank,
        world_size,
        AgentOptions(
            num_worker_threads=rpc_backend_options.num_worker_threads,
            rpc_timeout=rpc_backend_options.rpc_timeout,
            master_host=_master_host(rpc_backend_options.init_method),
            device_maps=portable(rpc_backend_options.device_maps),
            devices=[str(device) for device in rpc_backend_options.devices],
        ),
    )
    if judge is not None:
        agent.set_judge(judge)
    # Before the others can call us: what they call may use farprop.rpc.
    set_agent(agent)
    try:
        agent.join_group()
    except BaseException:
        reset_agent()
        agent.close()
        raise
    return agent


def _master_host(init_method: Any) -> str:
    """Where the job's other hosts are: which of our interfaces to listen on follows from it."""
    if not isinstance(init_method, str) or init_method.startswith("file:"):
        return "127.0.0.1"
    return urlparse(init_method).hostname or os.environ.get("MASTER_ADDR", "127.0.0.1")


register_backend("TENSORPIPE", TensorPipeRpcBackendOptions, _init_own_backend)
