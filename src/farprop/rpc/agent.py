"""The agent under torch's names: what ``rpc.api._get_current_rpc_agent()`` gives."""

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
from farprop.runtime.devices import portable
from farprop.runtime.rendezvous import host_of
from farprop.wire.dialect import PICKLES

_METRICS = ("thread_pool_size", "num_idle_threads", "client_active_calls", "server_active_calls")


class RpcAgent(Agent):
    """What every backend's agent has."""

    def join(self, shutdown: bool = False, timeout: float = 0) -> None:
        """Wait until no worker of the job has anything left to do. All of them have to call it.

        Args:
            shutdown: whether the agent is to be shut down next; nothing depends on it here.
            timeout: seconds to wait for the others; 0 as long as they live.
        """
        from farprop.rpc import api

        if self.is_static_group:
            api._wait_for_all_work(self, timeout)
        else:
            api._wait_for_own_work(self, timeout)

    def sync(self) -> None:
        """Does nothing, as for torch's own agent: a message is on its way when the call that sends it returns."""

    def get_metrics(self) -> dict[str, str]:
        """How busy this worker is, as text, under the keys that torch has."""
        info = self.get_debug_info()
        keys = [*(f"agent.{name}" for name in _METRICS), "agent.server_active_async_calls"]
        return {key: info[key] for key in (*keys, "agent.gil_average_wait_time_us") if key in info}

    def _get_device_map(self, worker_info: WorkerInfo) -> dict[torch.device, torch.device]:
        """Which devices of a worker take what is on devices here."""
        return self._devices.map_for(self.get_worker_info(worker_info).name)


class TensorPipeAgent(RpcAgent):
    """The agent of farprop's own backend, under the name that torch gives its own.

    Args:
        store: where the workers meet.
        name: unique in the job.
        rank: unique in the job.
        world_size: how many workers there are; None if they come and go.
        rpc_backend_options: what ``TensorPipeRpcBackendOptions`` says.
        reverse_device_maps: taken as torch takes it. Answers go by the inverse of the caller's map, which is in the
            roster of the job.
        devices: local devices used by calls, besides those of the options.
        restricted: whether other workers may only call what is exposed, with data. ``FARPROP_RESTRICTED`` says so, too.
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
    ) -> None:
        dialect = PICKLES
        if restricted or Settings.from_env().restricted:
            from farprop.rpc import restricted as mode  # with msgspec, which others need not import

            mode.check_options(rpc_backend_options.device_maps)
            mode.refuse_object_collectives()
            dialect = mode.data_dialect(name)
        self._options = rpc_backend_options
        # A device that is named twice is an error of the options, which the roster's judge finds.
        more = [device for device in devices if device not in rpc_backend_options.devices]
        super().__init__(
            store,
            name,
            rank,
            world_size,
            AgentOptions(
                num_worker_threads=rpc_backend_options.num_worker_threads,
                rpc_timeout=rpc_backend_options.rpc_timeout,
                master_host=_master_host(rpc_backend_options.init_method, store),
                device_maps=portable(rpc_backend_options.device_maps),
                devices=[str(device) for device in (*rpc_backend_options.devices, *more)],
                dialect=dialect,
            ),
        )

    @property
    def store(self) -> Any:
        """Where the workers of the job have met; None after the shutdown."""
        return self._group.users_store()

    def _get_backend_options(self) -> _TensorPipeRpcBackendOptionsBase:
        return self._options

    def _update_group_membership(
        self,
        worker_info: WorkerInfo,
        my_devices: Sequence[torch.device],
        reverse_device_map: Mapping[str, Mapping[torch.device, torch.device]],
        is_join: bool,
    ) -> None:
        """A worker has come or gone, in a group whose workers do: look at the store, which knows who is there."""
        self._group.refresh()


def _master_host(init_method: Any, store: dist.Store) -> str:
    """Where the job's other hosts are: which of our interfaces to listen on follows from it."""
    if not isinstance(init_method, str):
        return host_of(store) or "127.0.0.1"
    if init_method.startswith("file:"):
        return "127.0.0.1"
    return urlparse(init_method).hostname or os.environ.get("MASTER_ADDR", "127.0.0.1")
