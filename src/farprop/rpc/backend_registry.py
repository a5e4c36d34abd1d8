"""The registry of backends. Farprop's own is ``TENSORPIPE``, the name that programs written for torch use."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from farprop.protocol.roster import Entry
from farprop.rpc import api as api
from farprop.rpc import constants as rpc_constants
from farprop.rpc._utils import _group_membership_management as _group_membership_management
from farprop.rpc._utils import _update_group_membership as _update_group_membership
from farprop.rpc.agent import TensorPipeAgent
from farprop.rpc.options import TensorPipeRpcBackendOptions
from farprop.runtime.agent_registry import current_agent, reset_agent, set_agent
from farprop.runtime.device_maps import check_device_maps, portable

__all__ = [
    "BackendType",
    "BackendValue",
    "backend_registered",
    "construct_rpc_backend_options",
    "init_backend",
    "register_backend",
]


_A = TypeVar("_A", bound=TensorPipeAgent)
_Maps: TypeAlias = Mapping[str, Mapping[torch.device, torch.device]]


class BackendValue(NamedTuple):
    """A registered backend: the functions that make its options and its agent."""

    construct_rpc_backend_options_handler: Callable[..., Any]
    init_backend_handler: Callable[..., Any]


_backend_type_doc = "The registered backends. ``register_backend`` adds one."


def _backend_type_repr(self: Any) -> str:
    return f"BackendType.{self.name}"


def _make_enum(members: dict[str, BackendValue]) -> Any:
    backend_type = enum.Enum("BackendType", members)  # type: ignore[misc]
    backend_type.__repr__ = _backend_type_repr  # type: ignore[method-assign]
    backend_type.__doc__ = _backend_type_doc
    return backend_type


BackendType: Any = _make_enum({})


def backend_registered(backend_name: str) -> bool:
    """Whether a backend is registered.

    Args:
        backend_name: Its name.

    Returns:
        Whether it is.
    """
    return backend_name in BackendType.__members__


def register_backend(
    backend_name: str,
    construct_rpc_backend_options_handler: Callable[..., Any],
    init_backend_handler: Callable[..., Any],
) -> Any:
    """Register a backend. ``BackendType`` becomes a new enum with one more member.

    Args:
        backend_name: Its name.
        construct_rpc_backend_options_handler: Makes its options. Gets ``rpc_timeout``, ``init_method`` and what else is
            given to ``construct_rpc_backend_options``.
        init_backend_handler: Makes and starts its agent. Gets ``store``, ``name``, ``rank``, ``world_size`` and
            ``rpc_backend_options``.

    Returns:
        The member of the new ``BackendType``.

    Raises:
        RuntimeError: There is a backend of this name already.
    """
    global BackendType
    if backend_registered(backend_name):
        raise RuntimeError(f"RPC backend {backend_name}: already registered")
    members = {member.name: member.value for member in BackendType}
    members[backend_name] = BackendValue(construct_rpc_backend_options_handler, init_backend_handler)
    BackendType = _make_enum(members)
    return BackendType[backend_name]


def construct_rpc_backend_options(
    backend: Any,
    rpc_timeout: float = rpc_constants.DEFAULT_RPC_TIMEOUT_SEC,
    init_method: Any = rpc_constants.DEFAULT_INIT_METHOD,
    **kwargs: Any,
) -> Any:
    """Make the options of a backend.

    Args:
        backend: A member of ``BackendType``.
        rpc_timeout: The default timeout of calls in seconds; 0 disables it.
        init_method: How workers find each other.
        **kwargs: Further options of this backend.

    Returns:
        The options.
    """
    return backend.value.construct_rpc_backend_options_handler(
        rpc_timeout=rpc_timeout, init_method=init_method, **kwargs
    )


def init_backend(backend: Any, *args: Any, **kwargs: Any) -> Any:
    """Make and start the agent of a backend.

    Args:
        backend: A member of ``BackendType``.
        *args: Passed to its ``init_backend_handler``.
        **kwargs: Passed to it, too.

    Returns:
        The agent.
    """
    return backend.value.init_backend_handler(*args, **kwargs)


# Farprop's own


def _tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: Any,
    num_worker_threads: int = rpc_constants.DEFAULT_NUM_WORKER_THREADS,
    _transports: list[str] | None = None,
    _channels: list[str] | None = None,
    **kwargs: Any,
) -> TensorPipeRpcBackendOptions:
    return TensorPipeRpcBackendOptions(
        rpc_timeout=rpc_timeout,
        init_method=init_method,
        num_worker_threads=num_worker_threads,
        _transports=_transports,
        _channels=_channels,
        # Other options may be meant for another backend, and are ignored, as in torch.
        device_maps=kwargs.get("device_maps"),
        devices=kwargs.get("devices"),
    )


def _tensorpipe_init_backend_handler(
    store: dist.Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: Any,
    restricted: bool = False,
) -> TensorPipeAgent:
    _check_types(store, rpc_backend_options, TensorPipeRpcBackendOptions)
    return _start(TensorPipeAgent(store, name, rank, world_size, rpc_backend_options, {}, [], restricted))


def _check_types(store: Any, rpc_backend_options: Any, kind: type) -> None:
    if not isinstance(store, dist.Store):
        raise TypeError(f"`store` must be a c10d::Store. {store}")
    if not isinstance(rpc_backend_options, kind):
        raise TypeError(f"`rpc_backend_options` must be a `{kind.__name__}`, not {type(rpc_backend_options).__name__}.")


def _start(agent: _A) -> _A:
    """Make the agent current, and wait until it has found the other workers."""
    # First, because functions that others call may use farprop.rpc.
    set_agent(agent)
    try:
        agent.join_group()
    except BaseException:
        reset_agent()
        agent.close()
        raise
    return agent


# Device maps


def _get_device_infos() -> tuple[int, _Maps, list[torch.device]]:
    """This worker's number of CUDA devices, its device maps, and its devices."""
    agent = current_agent()
    assert isinstance(agent, TensorPipeAgent)
    options = agent._get_backend_options()
    return torch.cuda.device_count(), options.device_maps, options.devices


def _tensorpipe_validate_devices(devices: Iterable[torch.device], device_count: int) -> bool:
    """Whether a worker with ``device_count`` CUDA devices has all of these."""
    return all(
        device.type == "cpu" or (device.type == "cuda" and 0 <= device.index < device_count) for device in devices
    )


def _validate_device_maps(
    all_names: Sequence[str],
    all_device_counts: Mapping[str, int],
    all_device_maps: Mapping[str, _Maps],
    all_devices: Mapping[str, Sequence[torch.device]],
    is_static_group: bool = True,
) -> None:
    """Raise ``ValueError`` if the device maps of these workers can't be used together."""
    entries = [
        Entry(
            name=name,
            rank=rank,
            world_size=len(all_names),
            instance="",
            tcp=("", 0),
            unix="",
            net="",
            host="",
            pid=0,
            own_secret=False,
            device_maps=portable(all_device_maps[name]),
            devices=[str(device) for device in all_devices[name]],
            cuda_devices=all_device_counts[name],
        )
        for rank, name in enumerate(all_names)
    ]
    problem = check_device_maps(entries, is_static_group)
    if problem is not None:
        raise ValueError(problem)


def _create_reverse_mapping(
    my_name: str, all_names: Iterable[str], all_device_maps: Mapping[str, _Maps]
) -> dict[str, dict[torch.device, torch.device]]:
    """The inverse of each worker's device map for this worker, if it has one."""
    towards = {name: all_device_maps[name][my_name] for name in all_names if my_name in all_device_maps[name]}
    return {name: {target: source for source, target in one.items()} for name, one in towards.items()}


def _create_device_list(
    my_devices: Sequence[torch.device], my_device_maps: _Maps, reverse_device_maps: _Maps
) -> list[torch.device]:
    """The devices that calls of this worker use. By default all that the maps name."""
    named = {device for one in (*my_device_maps.values(), *reverse_device_maps.values()) for device in one}
    used = my_devices or named - {torch.device("cpu")}
    return sorted(used, key=lambda device: device.index)


register_backend("TENSORPIPE", _tensorpipe_construct_rpc_backend_options_handler, _tensorpipe_init_backend_handler)
