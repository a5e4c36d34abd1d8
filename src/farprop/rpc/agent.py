"""The agent under torch's names: what ``rpc.api._get_current_rpc_agent()`` returns."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist

from farprop.config import Settings
from farprop.ids import WorkerInfo
from farprop.rpc.options import _TensorPipeRpcBackendOptionsBase
from farprop.runtime.agent import Agent, AgentOptions
from farprop.runtime.device_maps import portable
from farprop.runtime.rendezvous import host_of
from farprop.wire.dialect import PICKLES, PICKLES_MAIN_BY_VALUE

_METRICS = ("thread_pool_size", "num_idle_threads", "client_active_calls", "server_active_calls")


class RpcAgent(Agent):
    """The base class of every backend's agent."""

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no worker of the job has work left. All workers have to call it.

        Args:
            shutdown: Whether the agent is shut down next. It makes no difference here.
            timeout: The seconds to wait for the others; 0 disables the timeout.

        Raises:
            RpcTimeoutError: The others did not finish in time.
        """
        from farprop.rpc import api

        if self.is_static_group:
            api._wait_for_all_work(self, timeout)
        else:
            api._wait_for_own_work(self, timeout)

    def sync(self) -> None:
        """Do nothing, as torch's own agent does: a message is on its way when the call that sends it returns."""

    def get_metrics(self) -> dict[str, str]:
        """Get figures about the load of this worker.

        Returns:
            Numbers as strings, under torch's keys.
        """
        info = self.get_debug_info()
        keys = [*(f"agent.{name}" for name in _METRICS), "agent.server_active_async_calls"]
        return {key: info[key] for key in (*keys, "agent.gil_average_wait_time_us") if key in info}

    def _get_device_map(self, worker_info: WorkerInfo) -> dict[torch.device, torch.device]:
        """The device map for calls to a worker."""
        return self._devices.map_for(self.get_worker_info(worker_info).name)


class TensorPipeAgent(RpcAgent):
    """The agent of farprop's own backend, under the name that torch gives its own.

    Args:
        store: The store through which the workers find each other.
        name: The worker's name, unique in the job.
        rank: The worker's rank, unique in the job.
        world_size: The number of workers; None if workers may join and leave.
        rpc_backend_options: The options, for example ``TensorPipeRpcBackendOptions``.
        reverse_device_maps: Accepted and ignored. Answers use the inverse of the caller's map, which is in the job's
            roster.
        devices: Local devices used by calls, in addition to those of the options.
        restricted: Whether other workers may only call exposed functions, with plain data. ``FARPROP_RESTRICTED=1`` has
            the same effect.
        pool_secret: For a worker of a pool that a program has started: the secret of the pool. Functions and classes
            of ``__main__`` then travel by value.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        world_size: int | None,
        rpc_backend_options: _TensorPipeRpcBackendOptionsBase,
        reverse_device_maps: Mapping[str, Mapping[torch.device, torch.device]],
        devices: Sequence[torch.device],
        restricted: bool = False,
        pool_secret: str | None = None,
    ) -> None:
        dialect = PICKLES if pool_secret is None else PICKLES_MAIN_BY_VALUE
        if restricted or Settings.from_env().restricted:
            from farprop.rpc import restricted as mode  # the codec of restricted jobs, which others don't need

            mode.check_options(rpc_backend_options.device_maps)
            mode.refuse_object_collectives()
            dialect = mode.data_dialect(name)
        self._options = rpc_backend_options
        # A device that the options name twice is an error, which the check of the roster finds.
        more = [device for device in devices if device not in rpc_backend_options.devices]
        super().__init__(
            store,
            name,
            rank,
            world_size,
            AgentOptions(
                num_worker_threads=rpc_backend_options.num_worker_threads,
                rpc_timeout=float(rpc_backend_options.rpc_timeout) or None,  # 0 disables it
                master_host=_master_host(rpc_backend_options.init_method, store),
                device_maps=portable(rpc_backend_options.device_maps),
                devices=[str(device) for device in (*rpc_backend_options.devices, *more)],
                dialect=dialect,
                secret=pool_secret,
            ),
        )

    @property
    def store(self) -> Any:
        """The store through which the workers found each other; None after the shutdown."""
        return self.membership.users_store()

    def _get_backend_options(self) -> _TensorPipeRpcBackendOptionsBase:
        return self._options

    def _update_group_membership(
        self,
        worker_info: WorkerInfo,
        my_devices: Sequence[torch.device],
        reverse_device_map: Mapping[str, Mapping[torch.device, torch.device]],
        is_join: bool,
    ) -> None:
        """A worker has joined or left: read from the store who is there."""
        self.membership.refresh()


def _master_host(init_method: Any, store: dist.Store) -> str:
    """The host of the store. It decides on which of our interfaces the agent listens."""
    if not isinstance(init_method, str):
        return host_of(store) or "127.0.0.1"
    if init_method.startswith("file:"):
        return "127.0.0.1"
    return urlparse(init_method).hostname or os.environ.get("MASTER_ADDR", "127.0.0.1")
