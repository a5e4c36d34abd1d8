"""Registers the backend ``FAULTY_TENSORPIPE``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from farprop.rpc import _testing, backend_registry, constants


def _faulty_tensorpipe_construct_rpc_backend_options_handler(
    rpc_timeout: float,
    init_method: Any,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: Sequence[str] = (),
    messages_to_delay: Mapping[str, float] | None = None,
    num_fail_sends: int = 0,
    **kwargs: Any,
) -> _testing.FaultyTensorPipeRpcBackendOptions:
    return _testing.FaultyTensorPipeRpcBackendOptions(
        num_worker_threads, rpc_timeout, init_method, messages_to_fail, messages_to_delay or {}, num_fail_sends
    )


def _faulty_tensorpipe_init_backend_handler(
    store: dist.Store, name: str, rank: int, world_size: int | None, rpc_backend_options: Any
) -> _testing.FaultyTensorPipeAgent:
    backend_registry._check_types(store, rpc_backend_options, _testing.FaultyTensorPipeRpcBackendOptions)
    agent = _testing.FaultyTensorPipeAgent(store, name, rank, world_size, rpc_backend_options, {}, [])
    return backend_registry._start(agent)


backend_registry.register_backend(
    "FAULTY_TENSORPIPE",
    _faulty_tensorpipe_construct_rpc_backend_options_handler,
    _faulty_tensorpipe_init_backend_handler,
)
