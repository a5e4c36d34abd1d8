"""Torch's faulty backend: importing this registers ``FAULTY_TENSORPIPE``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from farprop.rpc.agent import TensorPipeAgent
from farprop.rpc.options import _TensorPipeRpcBackendOptionsBase
from farprop.testing.faults import FaultPlan


def is_available() -> bool:
    """Torch's builds may lack its own; this one is always there."""
    return True


class FaultyTensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """Which types of messages fail (each message so many times) and which come late (by so many seconds)."""

    messages_to_fail: list[str]
    messages_to_delay: dict[str, float]
    num_fail_sends: int

    def __init__(
        self,
        num_worker_threads: int,
        rpc_timeout: float,
        init_method: str,
        messages_to_fail: Sequence[str],
        messages_to_delay: Mapping[str, float],
        num_fail_sends: int,
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


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent whose messages fail or come late, as its options say."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        world_size: int | None,
        opts: FaultyTensorPipeRpcBackendOptions,
        reverse_device_maps: Mapping[str, Mapping[torch.device, torch.device]],
        devices: Sequence[torch.device],
    ) -> None:
        judge = opts.plan().judge  # first, because it refuses what it does not know
        super().__init__(store, name, rank, world_size, opts, reverse_device_maps, devices)
        self.set_judge(judge)


from farprop.rpc._testing import faulty_agent_backend_registry  # noqa: E402, it needs the classes above

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]
