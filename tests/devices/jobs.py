"""Jobs whose workers have device maps: the body runs on worker 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import farprop.rpc as rpc
from tests.devices import standin  # noqa: F401  (makes the devices, in every worker)
from tests.support.workers import run_workers

Maps = dict[str, dict[str, str]]


def job(body: Callable[[], Any], *maps: Maps, transport: str = "auto") -> None:
    """Run ``body`` on worker 0 of a job that has a worker for each of these ``device_maps``."""
    run_workers(_worker, len(maps), (body, maps), env={"FARPROP_TRANSPORT": transport})


def _worker(rank: int, body: Callable[[], Any], maps: tuple[Maps, ...]) -> None:
    init(rank, len(maps), maps[rank])
    if rank == 0:
        body()
    rpc.shutdown()


def init(rank: int, world_size: int | None, device_maps: Any, **options: Any) -> None:
    made = rpc.TensorPipeRpcBackendOptions(device_maps=device_maps, **options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=made)
