"""``send`` and ``recv`` of the backend."""

from __future__ import annotations

import time
from datetime import timedelta

import torch

from farprop.distributed.interop import NO_TIMEOUT
from farprop.distributed.native.framing import FrameKind
from farprop.distributed.native.matching import PostedRecv
from farprop.distributed.native.mesh import Mesh
from farprop.distributed.native.tensors import bytes_of, check_device, copy_back, dtype_name
from farprop.distributed.work import Work, begin_profile_event, completed, end_profile_event
from farprop.errors import CollectiveTimeoutError, renewed


def send(mesh: Mesh, tensor: torch.Tensor, to: int, tag: int, timeout: timedelta) -> Work:
    """Send a tensor. It is done when the system has the bytes: the other rank always reads.

    Raises:
        UsageError: the tensor is not on the CPU.
        CollectiveError: it can't be sent; ``Mesh.send`` says when.
    """
    check_device(tensor)
    deadline = time.monotonic() + timeout.total_seconds()
    event = begin_profile_event("send", [tensor])
    try:
        mesh.send(to, FrameKind.MESSAGE, tag, dtype_name(tensor), bytes_of(tensor.contiguous()), deadline)
    finally:
        end_profile_event(event)
    return completed([tensor])


def receive(mesh: Mesh, tensor: torch.Tensor, source: int | None, tag: int, timeout: timedelta) -> Work:
    """Receive into a tensor, from one rank or (None) from any.

    Raises:
        UsageError: the tensor is not on the CPU.
    """
    check_device(tensor)
    return _RecvWork(mesh, tensor, source, tag, timeout)


class _RecvWork(Work):
    """The work of a receive; whoever waits for it waits no longer than the group's timeout."""

    def __init__(self, mesh: Mesh, tensor: torch.Tensor, source: int | None, tag: int, timeout: timedelta) -> None:
        super().__init__()
        self._mesh = mesh
        self._timeout = timeout
        self._event = begin_profile_event("recvAnySource" if source is None else "recv", [tensor])
        self._tensor, self._received = tensor, tensor.detach().contiguous()
        buffer = bytes_of(self._received)
        self._recv = PostedRecv(FrameKind.MESSAGE, source, tag, buffer, dtype_name(tensor), self._on_done)
        self._whom = "any rank" if source is None else f"rank {source}"
        mesh.post(self._recv)

    def _on_done(self, _: PostedRecv, error: Exception | None) -> None:
        # Before the work ends: whoever waits for it may stop profiling next.
        end_profile_event(self._event)
        if error is not None:
            self.fail(error)
            return
        copy_back(self._tensor, self._received)
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
                f"{self._recv.key}."
            )
            self._mesh.matcher.cancel(self._recv, error)
            raise renewed(error) from None

    def _source_rank(self) -> int:
        return -1 if self._recv.source is None else self._recv.source
