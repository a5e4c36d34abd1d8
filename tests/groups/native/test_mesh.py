"""The mesh of one rank, whose other ranks are sockets that the test holds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from farprop.distributed.native import pulse
from farprop.distributed.native.frames import BEAT, Kind, pack
from farprop.distributed.native.inbox import Receipt
from farprop.distributed.native.mesh import Mesh
from farprop.distributed.native.pulse import Pulse

Pair = tuple[socket.socket, socket.socket]


def near() -> Pair:
    return socket.socketpair()


def far() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]


@contextmanager
def rank_0(make: Callable[[], Pair]) -> Iterator[tuple[Mesh, socket.socket]]:
    """A mesh, and the other end of its connection to rank 1."""
    ours, theirs = make()
    with theirs:
        theirs.settimeout(60)
        mesh = Mesh(0, {1: ours}, 1 << 20, lambda: None)
        try:
            yield mesh, theirs
        finally:
            mesh.close()


@pytest.mark.parametrize("beats", [0, 1, 23, 24, 25, 1000])
def test_beats_between_frames_mean_nothing(beats):
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    with rank_0(near) as (mesh, theirs):
        for number in range(3):
            room = bytearray(4)
            mesh.expect(Receipt(Kind.MESSAGE, 1, 7, memoryview(room), "int8", lambda receipt, error: ended.put(error)))
            theirs.sendall(BEAT * beats + pack(Kind.MESSAGE, 7, "int8", 4) + bytes([number, 0, 0, 1]))
            assert ended.get(timeout=60) is None
            assert room == bytes([number, 0, 0, 1])


def test_quiet_connections_get_beats():
    with rank_0(far) as (_, theirs):
        assert theirs.recv(1) == BEAT
        assert theirs.recv(1) == BEAT


def test_a_host_whose_process_reads_nothing_has_a_pulse():
    """Its room is full, so nothing can be sent; but its system answers when it is asked."""
    ours, theirs = far()
    with ours, theirs:
        assert pulse.can_watch(ours)
        ours.setblocking(False)
        end = time.monotonic() + 4
        while time.monotonic() < end:  # that this time passes is what is tested
            try:
                ours.send(bytes(1 << 20))
            except BlockingIOError:
                assert pulse.look(ours) is not Pulse.GONE


def test_connections_within_a_host_need_no_beats():
    ours, theirs = near()
    with ours, theirs:
        assert not pulse.can_watch(ours)


class Endless:
    """A reader of one that sends faster than can be read."""

    def read(self) -> bool:
        return True


def test_one_that_never_stops_sending_does_not_hide_the_others():
    news = threading.Event()
    (first, talker), (second, dying) = near(), near()
    with talker, dying:
        mesh = Mesh(0, {1: first, 2: second}, 1 << 20, news.set)
        mesh._readers[1] = Endless()
        talker.send(BEAT)
        dying.close()
        assert news.wait(60)
        assert "lost rank 2" in str(mesh.standing.failure)
        mesh.close()
