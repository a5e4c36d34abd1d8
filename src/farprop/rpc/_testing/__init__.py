"""Torch's faulty backend: importing this registers ``FAULTY_TENSORPIPE``."""

from __future__ import annotations

from typing import Any

from farprop.rpc import backend_registry, constants
from farprop.rpc.options import TensorPipeRpcBackendOptions
from farprop.testing.faults import FaultPlan


class FaultyTensorPipeRpcBackendOptions(TensorPipeRpcBackendOptions):
    """Which types of messages fail (each message so many times) and which come late (by so many seconds)."""

    def __init__(
        self,
        num_worker_threads: int,
        rpc_timeout: float,
        init_method: str,
        messages_to_fail: list[str],
        messages_to_delay: dict[str, float],
        num_fail_sends: int = 0,
    ) -> None:
        super().__init__(num_worker_threads=num_worker_threads, rpc_timeout=rpc_timeout, init_method=init_method)
        self.messages_to_fail = list(messages_to_fail)
        self.messages_to_delay = dict(messages_to_delay)
        self.num_fail_sends = num_fail_sends

    def plan(self) -> FaultPlan:
        plan = FaultPlan()
        if self.messages_to_fail and self.num_fail_sends:
            plan.fail(self.messages_to_fail, sends=self.num_fail_sends)
        for kind, seconds in self.messages_to_delay.items():
            plan.delay(seconds, [kind])
        return plan


def _construct_options(
    rpc_timeout: float,
    init_method: str,
    num_worker_threads: int = constants.DEFAULT_NUM_WORKER_THREADS,
    messages_to_fail: list[str] | None = None,
    messages_to_delay: dict[str, float] | None = None,
    num_fail_sends: int = 0,
    **_: Any,
) -> FaultyTensorPipeRpcBackendOptions:
    return FaultyTensorPipeRpcBackendOptions(
        num_worker_threads, rpc_timeout, init_method, messages_to_fail or [], messages_to_delay or {}, num_fail_sends
    )


def _init_backend(
    store: Any, name: str, rank: int, world_size: int | None, rpc_backend_options: FaultyTensorPipeRpcBackendOptions
) -> Any:
    if not isinstance(rpc_backend_options, FaultyTensorPipeRpcBackendOptions):
        raise TypeError("`rpc_backend_options` must be a `FaultyTensorPipeRpcBackendOptions`")
    judge = rpc_backend_options.plan().judge
    return backend_registry._init_own_backend(store, name, rank, world_size, rpc_backend_options, judge)


if not backend_registry.backend_registered("FAULTY_TENSORPIPE"):
    backend_registry.register_backend("FAULTY_TENSORPIPE", _construct_options, _init_backend)
