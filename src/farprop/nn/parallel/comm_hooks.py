"""Communication hooks: how a bucket is reduced. Torch's own hooks run here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from farprop import _torch
from farprop.errors import UsageError
from farprop.nn.parallel.bucket_buffers import FlatBuffer

# Called with a state and a GradBucket. The second type is Any, so that hooks annotated with torch's GradBucket fit.
CommHook = Callable[[Any, Any], Future[torch.Tensor]]


class GradBucket:
    """What a hook sees of a bucket, with the methods of torch's ``GradBucket``."""

    def __init__(self, bucket: FlatBuffer, index: int, is_last: bool, buffer: torch.Tensor) -> None:
        self._bucket = bucket
        self._index = index
        self._is_last = is_last
        self._buffer = buffer

    def index(self) -> int:
        """The bucket's position in the order in which buckets are reduced."""
        return self._index

    def is_last(self) -> bool:
        """Whether this is the last bucket of the iteration."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket, as one flat tensor."""
        return self._buffer

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Replace the buffer, for a hook that wraps another hook."""
        self._buffer = tensor

    def gradients(self) -> list[torch.Tensor]:
        """Views of the buffer, in the shapes of the parameters."""
        if self._bucket.is_sparse:
            return [self._buffer]
        sizes = [parameter.numel() for parameter in self._bucket.parameters]
        parts = self._buffer.split(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self._bucket.parameters, strict=True)]

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of :meth:`gradients`."""
        return list(self._bucket.parameters)


def allreduce_sum(group: dist.ProcessGroup, bucket: GradBucket) -> Future[Any]:
    """Reduce a bucket without a hook. Its gradients are already divided by the number of ranks."""
    return group.allreduce([bucket.buffer()], dist.AllreduceOptions()).get_future()


def checked_future(hook: CommHook, result: object) -> Future[Any]:
    """What a user's hook returned; raises ``UsageError`` if it is not a future."""
    if not isinstance(result, _torch.Future):  # futures made in C++ are not instances of torch.futures.Future
        raise UsageError(
            f"The communication hook {getattr(hook, '__qualname__', hook)} has to return a torch.futures.Future of the "
            f"reduced buffer, but returned {type(result).__name__}."
        )
    return result  # type: ignore[no-any-return]
