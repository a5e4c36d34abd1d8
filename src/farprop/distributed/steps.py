"""A group's own primitives, one at a time and waited for: what derived collectives are made of."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from farprop.distributed.calling import wait_within
from farprop.errors import CollectiveTimeoutError

# Messages of derived collectives have a tag of their own, so that they don't meet those of the user.
TAG = 1 << 30


class Steps:
    """The steps of one derived collective. Tensors that the group gets are contiguous."""

    def __init__(self, group: Any, name: str, timeout: timedelta) -> None:
        self._group = group
        self._name = name
        self._timeout = timeout
        self.rank: int = group.rank()
        self.size: int = group.size()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._wait(self._group.send([tensor.contiguous()], to, TAG), f"rank {to}")

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        came = tensor if tensor.is_contiguous() else torch.empty_like(tensor, memory_format=torch.contiguous_format)
        self._wait(self._group.recv([came], source, TAG), f"rank {source}")
        if came is not tensor:
            tensor.copy_(came)

    def swap(self, tensor: torch.Tensor, into: torch.Tensor, partner: int) -> None:
        """Send and receive. The lower rank sends first: a ``send`` may block until somebody receives."""
        if self.rank < partner:
            self.send(tensor, partner)
            self.receive(into, partner)
        else:
            received = torch.empty_like(into, memory_format=torch.contiguous_format)
            self.receive(received, partner)  # not into its place yet: that may be where the tensor is
            self.send(tensor, partner)
            into.copy_(received)

    def allreduce(self, tensor: torch.Tensor, op: Any) -> None:
        options = AllreduceOptions()
        options.reduceOp = op
        options.timeout = self._timeout
        self._wait(self._group.allreduce([tensor], options), "the others")

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = self._timeout
        self._wait(self._group.broadcast([tensor], options), f"rank {root}")

    def allgather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._wait(self._group.allgather([list(outputs)], [tensor.contiguous()], options), "the others")

    def _wait(self, work: Any, whom: str) -> None:
        try:
            if wait_within(work, self._timeout):
                return
            cause = None
        except TimeoutError as error:
            cause = error
        raise CollectiveTimeoutError(
            f"Rank {self.rank} timed out in {self._name} after {self._timeout.total_seconds():g} s: it waited for "
            f"{whom}. Every rank of a group has to call the same collectives in the same order."
        ) from cause
