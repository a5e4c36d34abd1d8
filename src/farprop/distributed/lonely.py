"""A group of one rank."""

from __future__ import annotations

from typing import Any

from farprop.distributed.arguments import as_list, as_lists, operation
from farprop.distributed.group import ProcessGroup
from farprop.distributed.reduction import Reduction
from farprop.distributed.work import Work, completed
from farprop.errors import UsageError

__all__ = ["LonelyProcessGroup"]


class LonelyProcessGroup(ProcessGroup):
    """A group whose only rank is 0: what runs on a job runs on a desk, with nothing to start.

    It is also the shortest example of a group: three collectives are written, the others follow from them.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        if (rank, size) != (0, 1):
            raise UsageError(f"A LonelyProcessGroup has one rank, and can't be rank {rank} of {size}.")
        super().__init__(rank, size)

    def getBackendName(self) -> str:  # noqa: N802
        return "lonely"

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        reduction = Reduction(operation(opts), 1)
        for tensor in as_list(tensors):
            reduction.begin(tensor)
        return completed(as_list(tensors))

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        return completed(as_list(tensors))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        lists, tensors = as_lists(outputs, inputs)
        for output, tensor in zip(lists, tensors, strict=True):
            output[0].copy_(tensor)
        return completed([output[0] for output in lists])
