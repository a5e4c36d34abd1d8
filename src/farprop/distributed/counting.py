"""A group that counts."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from farprop.distributed.calling import NO_TIMEOUT
from farprop.distributed.wrapping import WrappedProcessGroup, WrappedWork

__all__ = ["CountingProcessGroup"]


class CountingProcessGroup(WrappedProcessGroup):
    """Does what another group does, and counts it: to see what a program asks of its group.

    Args:
        group: any group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.calls: Counter[str] = Counter()
        """How often each collective was called, by name."""
        self.bytes: Counter[str] = Counter()
        """How many bytes the tensors had that this rank gave to each, outputs included."""
        self.waits = 0
        """How often somebody waited on a work."""
        self.futures = 0
        """How often somebody asked a work for its future."""
        self._lock = threading.Lock()

    def run(self, name: str, start: Callable[[], Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self.calls[name] += 1
            self.bytes[name] += sum(tensor.nbytes for tensor in _tensors(arguments))
        return _CountedWork(start(), self)

    def _count_wait(self) -> None:
        with self._lock:
            self.waits += 1

    def _count_future(self) -> None:
        with self._lock:
            self.futures += 1


class _CountedWork(WrappedWork):
    def __init__(self, work: Any, group: CountingProcessGroup) -> None:
        super().__init__(work)
        self._group = group

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        self._group._count_wait()
        return super().wait(timeout)

    def get_future(self) -> Future[Any]:
        self._group._count_future()
        return super().get_future()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
