"""``send`` and ``recv``."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from farprop.distributed.calling import NO_TIMEOUT
from farprop.distributed.native import profiles
from farprop.distributed.native.frames import Kind, bytes_of
from farprop.distributed.native.inbox import Receipt
from farprop.distributed.native.mesh import Mesh
from farprop.distributed.native.tensors import check, dtype_name, put_back
from farprop.distributed.work import Work, completed
from farprop.errors import CollectiveTimeoutError, renewed


def send(mesh: Mesh, tensor: torch.Tensor, to: int, tag: int, timeout: timedelta) -> Work:
    """Done when the system has the bytes: whoever they are for always reads."""
    check(tensor)
    deadline = time.monotonic() + timeout.total_seconds()
    event = profiles.begin("send", [tensor])
    try:
        mesh.send(to, Kind.MESSAGE, tag, dtype_name(tensor), bytes_of(tensor.contiguous()), deadline)
    finally:
        profiles.end(event)
    return completed([tensor])


def receive(mesh: Mesh, tensor: torch.Tensor, source: int | None, tag: int, timeout: timedelta) -> Work:
    check(tensor)
    return _Receiving(mesh, tensor, source, tag, timeout)


class _Receiving(Work):
    def __init__(self, mesh: Mesh, tensor: torch.Tensor, source: int | None, tag: int, timeout: timedelta) -> None:
        super().__init__()
        self._mesh = mesh
        self._timeout = timeout
        self._event = profiles.begin("recvAnySource" if source is None else "recv", [tensor])
        self._tensor, self._came = tensor, tensor.detach().contiguous()
        self._receipt = Receipt(Kind.MESSAGE, source, tag, bytes_of(self._came), dtype_name(tensor), self._on_end)
        self._whom = "any rank" if source is None else f"rank {source}"
        mesh.expect(self._receipt)

    def _on_end(self, receipt: Receipt, error: Exception | None) -> None:
        # First this: whoever waits may stop profiling next.
        profiles.end(self._event)
        if error is not None:
            self.fail(error)
            return
        put_back(self._tensor, self._came)
        self.complete([self._tensor])

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        limit = timeout if timeout > NO_TIMEOUT else self._timeout
        try:
            return super().wait(limit)
        except CollectiveTimeoutError:
            if self.is_completed():
                raise
            error = CollectiveTimeoutError(
                f"Rank {self._mesh.rank} waited {limit.total_seconds():g} s to receive from {self._whom}, with tag "
                f"{self._receipt.key}."
            )
            self._mesh.inbox.give_up(self._receipt, error)
            raise renewed(error) from None

    def _source_rank(self) -> int:
        return -1 if self._receipt.source is None else self._receipt.source
