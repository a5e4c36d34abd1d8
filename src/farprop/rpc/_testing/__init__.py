"""Torch's faulty backend. Importing this package registers ``FAULTY_TENSORPIPE``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from farprop.rpc.agent import TensorPipeAgent
from farprop.rpc.options import _TensorPipeRpcBackendOptionsBase
from farprop.testing.faults import FaultPlan


def is_available() -> bool:
    """Whether the faulty backend is available. Always true, unlike in some builds of torch.

    Returns:
        True.
    """
    return True


class FaultyTensorPipeRpcBackendOptions(_TensorPipeRpcBackendOptionsBase):
    """Options of the faulty backend.

    Args:
        num_worker_threads: How many calls of other workers run at once.
        rpc_timeout: The default timeout of calls in seconds; 0 disables it.
        init_method: How workers find each other.
        messages_to_fail: The types of message that fail.
        messages_to_delay: The seconds by which messages are delayed, by type.
        num_fail_sends: How many attempts to send each message fail.
    """

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
        """Make the fault plan of these options.

        Returns:
            The plan.

        Raises:
            ValueError: There is no such type of message.
        """
        plan = FaultPlan()
        if self.messages_to_fail and self.num_fail_sends:
            plan.fail(self.messages_to_fail, sends=self.num_fail_sends)
        for kind, seconds in self.messages_to_delay.items():
            plan.delay(seconds, [kind])
        return plan


class FaultyTensorPipeAgent(TensorPipeAgent):
    """An agent whose messages fail or are delayed.

    Args:
        store: The store through which the workers find each other.
        name: The worker's name.
        rank: The worker's rank.
        world_size: The number of workers; None if workers may join and leave.
        opts: Which messages fail or are delayed.
        reverse_device_maps: Accepted and ignored.
        devices: Local devices used by calls.
    """

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
        policy = opts.plan().decide  # first, because it raises for unknown types
        super().__init__(store, name, rank, world_size, opts, reverse_device_maps, devices)
        self.peers.set_fault_policy(policy)


from farprop.rpc._testing import faulty_agent_backend_registry  # noqa: E402, it needs the classes above

__all__ = [
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "faulty_agent_backend_registry",
    "is_available",
]
