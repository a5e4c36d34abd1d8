"""The messages of one collective between this rank and ranks of other hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import torch

from farprop.distributed.arguments import bytes_of
from farprop.distributed.native.framing import FrameKind
from farprop.distributed.native.group_state import PATIENCE, CollectiveCall
from farprop.distributed.native.matching import PostedRecv
from farprop.distributed.native.mesh import Mesh
from farprop.errors import RankLostError

Tensors = Sequence[torch.Tensor]


class HostMessages:
    """Receives are posted first, then this rank sends, then it waits. So messages arrive in their final place.

    Two ranks that exchange several messages in a collective have to post them in the order in which they are sent.

    Args:
        mesh: the connections of this rank.
        call: the collective.
    """

    def __init__(self, mesh: Mesh, call: CollectiveCall) -> None:
        self._mesh, self._call = mesh, call
        self._arrivals: list[_Arrival] = []

    def expect(self, source: int, into: Tensors) -> None:
        """Post a receive. The message has the elements of flat tensors, one after the other."""
        arrival = _Arrival(source, into)
        self._arrivals.append(arrival)
        buffer, call = bytes_of(arrival.buffer), self._call
        recv = PostedRecv(FrameKind.COLLECTIVE, source, call.number, buffer, call.fingerprint, arrival.on_done)
        self._mesh.post(recv)

    def send(self, to: int, parts: Tensors) -> None:
        """Send flat tensors of one dtype as one message; return when the system has taken all of it.

        Raises:
            CollectiveError: as ``wait``.
        """
        call = self._call
        data = bytes_of(parts[0] if len(parts) == 1 else torch.cat(list(parts))) if parts else memoryview(b"")
        try:
            self._mesh.send(to, FrameKind.COLLECTIVE, call.number, call.fingerprint, data, call.deadline)
        except RankLostError:
            self._mesh.state.check_wait([to], call)  # raises what those raise that wait for the rank
            raise

    def wait(self) -> None:
        """Wait until everything that was expected has arrived.

        Raises:
            CollectiveError: the group broke, a rank has left, or the collective's time is over.
        """
        for arrival in self._arrivals:
            self._wait_for(arrival)
            arrival.unpack()
        self._arrivals.clear()

    def _wait_for(self, arrival: _Arrival) -> None:
        call, state = self._call, self._mesh.state
        if not arrival.done.wait(PATIENCE):
            self._mesh.announce(call)
        while not arrival.done.wait(max(0.0, call.deadline - time.monotonic())):
            state.check_wait([arrival.source], call)
        if arrival.error is not None:
            state.check_wait([arrival.source], call)
            raise arrival.error


class _Arrival:
    """A message that was posted: where it goes, and its end, to wait for."""

    def __init__(self, source: int, into: Tensors) -> None:
        self.source = source
        self._into = into
        if len(into) == 1:
            self.buffer = into[0]
        else:
            self.buffer = torch.empty(sum(part.nbytes for part in into), dtype=torch.uint8)
        self.done = threading.Event()
        self.error: Exception | None = None

    def on_done(self, _: PostedRecv, error: Exception | None) -> None:
        self.error = error
        self.done.set()

    def unpack(self) -> None:
        """If the message is for several tensors, copy it to them."""
        if len(self._into) > 1:
            sizes = [part.nbytes for part in self._into]
            for part, data in zip(self._into, self.buffer.split(sizes), strict=True):
                part.copy_(data.view(part.dtype))
