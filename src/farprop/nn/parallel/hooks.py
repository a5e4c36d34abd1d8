"""Communication hooks: how a bucket is reduced. Torch's own hooks run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from farprop import _torch
from farprop.errors import UsageError
from farprop.nn.parallel.buckets import Bucket

CommHook = Callable[[Any, Any], Future[torch.Tensor]]


class GradBucket:
    """A bucket as hooks see it, under torch's names."""

    def __init__(self, bucket: Bucket, index: int, is_last: bool, buffer: torch.Tensor) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = buffer

    def index(self) -> int:
        """Its place in the order in which buckets are reduced."""
        return self._index

    def is_last(self) -> bool:
        """Whether no other bucket of this iteration follows."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """All of its gradients, as one flat tensor."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """For hooks around hooks: what the inner one is to reduce."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, in the shapes of the parameters."""
        if self._bucket.is_sparse:
            return [self._buffer]
        sizes = [parameter.numel() for parameter in self._bucket.parameters]
        parts = self._buffer.split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._bucket.parameters, strict=True)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """Those that the gradients are of."""
        return list(self._bucket.parameters)


def reduce_by_sum(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Any]:
    """What happens without a hook. Gradients have been divided by the number of ranks."""
    return group.allreduce([bucket.buffer()], dist.AllreduceOptions()).get_future()


def checked_future(hook: CommHook, result: Any) -> Future[Any]:
    """What a user's hook returned, if it can be used."""
    if not isinstance(result, _torch.Future):  # those that come from C++ are not of the class in torch.futures
        raise UsageError(
            f"The communication hook {getattr(hook, '__qualname__', hook)} has to return a torch.futures.Future of the "
            f"reduced buffer, but returned {type(result).__name__}."
        )
    return result  # type: ignore[no-any-return]
