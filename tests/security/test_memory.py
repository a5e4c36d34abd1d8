"""Announced lengths cost no memory: memory grows as bytes arrive."""

from __future__ import annotations

import socket
import struct
import threading

import pytest

from farprop.distributed.native import framing as group_frames
from farprop.distributed.native.framing import FrameKind
from farprop.distributed.native.mesh import Mesh
from farprop.errors import ProtocolError, RankLostError
from farprop.wire.frames import FrameReader, room_for
from farprop.wire.message import REQUEST
from tests.security.raw import memory, proven, serves
from tests.support.raw_messages import pack
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport

GIB = 1 << 30
HEADER = struct.Struct("<BBHHHQdQ")
BOMBS = {
    "a large body": HEADER.pack(REQUEST, 0, 0, 0, 0, 1, 0.0, GIB),
    "a large buffer": pack(REQUEST, 0, 1, 0.0, b"", b"", [(GIB, 0)]),
    "many buffers": pack(REQUEST, 0, 1, 0.0, b"", b"", [(200_000, 0)] * 65_000),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_announced_sizes_allocate_no_memory(bomb: str) -> None:
    with cluster(2) as c:
        with proven(c) as connection:
            serves(c)
            before = memory(c.pid(0))
            connection.sendall(BOMBS[bomb] + bytes(1000))
            while c.run(0, _bytes_expected) < 100_000:
                pass  # the worker has still to read it
            serves(c)
            assert memory(c.pid(0)) - before < 50 << 20
        serves(c)


def _bytes_expected() -> int:
    """The memory that this worker's frame readers have allocated for incomplete messages."""
    from farprop.runtime.agent_registry import current_agent

    connections = current_agent()._accepted.all()
    pieces = [connection._reader._piece for connection in connections]
    return sum(len(piece) for piece in pieces if piece is not None)


def test_failed_allocation_is_a_protocol_error() -> None:
    data = HEADER.pack(REQUEST, 0, 0, 0, 0, 1, 0.0, 1 << 60)
    reader = FrameReader(1 << 62)
    reader.target[: len(data)] = data
    with pytest.raises(ProtocolError, match="no memory"):
        reader.received(len(data))
    with pytest.raises(ProtocolError, match="no memory"):
        room_for(1 << 70)


def test_announced_message_of_a_rank_allocates_no_memory() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        mesh = Mesh(0, {1: ours}, 2 * GIB, lambda: None)
        try:
            before = memory()
            theirs.sendall(group_frames.pack(FrameKind.MESSAGE, 7, "int8", GIB) + bytes(1000))
            while mesh._readers[1]._message is None:
                pass
            assert memory() - before < 50 << 20
        finally:
            mesh.close()


def test_failed_allocation_loses_the_rank_but_not_the_mesh_thread() -> None:
    ours, theirs = socket.socketpair()
    news = threading.Event()
    with theirs:
        mesh = Mesh(0, {1: ours}, 1 << 62, news.set)
        try:
            theirs.settimeout(60)
            theirs.sendall(group_frames.pack(FrameKind.MESSAGE, 7, "int8", 1 << 60))
            while theirs.recv(4096):
                pass
            assert news.wait(60)
            assert isinstance(mesh.state.failure, RankLostError)
            assert "no memory" in str(mesh.state.failure)
            assert mesh._thread.is_alive()
        finally:
            mesh.close()
