"""The simplest group of several ranks: it sends messages as entries of a c10d store."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farprop.distributed import ProcessGroup, Work
from farprop.distributed.interop import NO_TIMEOUT
from farprop.distributed.work import completed
from farprop.errors import CollectiveTimeoutError
from farprop.rpc.store import await_listener


class StoreGroup(ProcessGroup):
    """``send`` and ``recv``, and nothing else."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta = timedelta(seconds=50)) -> None:
        super().__init__(rank, size, timeout)
        self._messages_store = store
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}

    def getBackendName(self) -> str:  # noqa: N802
        return "stored"

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Work:
        number = self._sent[dst, tag] = self._sent.get((dst, tag), 0) + 1
        data = bytes(tensors[0].reshape(-1).view(torch.uint8).tolist())
        self._messages_store.set(f"{self.rank()}/{dst}/{tag}/{number}", data)
        return completed(tensors)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Work:
        number = self._received[src, tag] = self._received.get((src, tag), 0) + 1
        return _RecvWork(self._messages_store, f"{src}/{self.rank()}/{tag}/{number}", tensors[0])


class _RecvWork(Work):
    """A work whose ``wait`` receives the message."""

    def __init__(self, store: dist.Store, key: str, tensor: torch.Tensor) -> None:
        super().__init__()
        self._store, self._key, self._tensor = store, key, tensor

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        if not self.is_completed():
            try:
                self._store.wait([self._key], timeout or timedelta(seconds=50))
            except dist.DistStoreError as error:
                raise CollectiveTimeoutError(str(error)) from error
            data = bytearray(self._store.get(self._key))
            if data:
                self._tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
            self._store.delete_key(self._key)
            self.complete([self._tensor])
        return super().wait(timeout)


class ThreeGroup(ProcessGroup):
    """``allreduce``, ``broadcast`` and ``allgather`` of another group, and nothing else."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._group.allreduce(tensors, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._group.broadcast(tensors, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return self._group.allgather(outputs, inputs, opts)


def job_store(rank: int, world_size: int) -> dist.TCPStore:
    """The store of the workers of a test."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        await_listener(address, port, 50)  # the store would sleep for up to a second
    return dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timedelta(seconds=50))
