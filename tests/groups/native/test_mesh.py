"""The mesh of one rank, whose other ranks are sockets that the test holds."""

from __future__ import annotations

import gc
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from farprop.distributed.native.framing import HEADER_SIZE, HEARTBEAT, FrameKind, FrameReader, pack, unpack
from farprop.distributed.native.host_messages import HostMessages
from farprop.distributed.native.matching import PostedRecv
from farprop.distributed.native.mesh import Mesh
from farprop.errors import CollectiveMismatchError, CollectiveTimeoutError, RankLostError
from farprop.protocol.host_liveness import HostLiveness, HostState
from farprop.transport import sockets

SocketPair = tuple[socket.socket, socket.socket]


def unix_pair() -> SocketPair:
    return socket.socketpair()


def tcp_pair() -> SocketPair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]


@contextmanager
def rank_0(make: Callable[[], SocketPair]) -> Iterator[tuple[Mesh, socket.socket]]:
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
def test_heartbeats_between_frames_are_skipped(beats):
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    with rank_0(unix_pair) as (mesh, theirs):
        for number in range(3):
            room = bytearray(4)
            mesh.post(PostedRecv(FrameKind.MESSAGE, 1, 7, memoryview(room), "int8", lambda _, error: ended.put(error)))
            theirs.sendall(HEARTBEAT * beats + pack(FrameKind.MESSAGE, 7, "int8", 4) + bytes([number, 0, 0, 1]))
            assert ended.get(timeout=60) is None
            assert room == bytes([number, 0, 0, 1])


def test_idle_connections_get_heartbeats():
    with rank_0(tcp_pair) as (_, theirs):
        assert theirs.recv(1) == HEARTBEAT
        assert theirs.recv(1) == HEARTBEAT


def test_a_host_is_not_vanished_if_its_process_reads_nothing():
    """Its socket buffers are full, so nothing can be sent, but its kernel answers probes."""
    ours, theirs = tcp_pair()
    with ours, theirs:
        assert sockets.can_probe(ours)
        ours.setblocking(False)
        end = time.monotonic() + 4
        while time.monotonic() < end:  # the test is that nothing fails in this time
            try:
                ours.send(bytes(1 << 20))
            except BlockingIOError:
                assert HostLiveness().on_probe(sockets.tcp_facts(ours)) is not HostState.VANISHED


def test_connections_within_a_host_need_no_heartbeats():
    ours, theirs = unix_pair()
    with ours, theirs:
        assert not sockets.can_probe(ours)


def test_a_rank_that_never_stops_sending_does_not_starve_the_others(monkeypatch):
    failed = threading.Event()
    (first, flooding), (second, dying) = unix_pair(), unix_pair()
    with flooding, dying:
        mesh = Mesh(0, {1: first, 2: second}, 1 << 20, failed.set)
        read = mesh._read
        monkeypatch.setattr(mesh, "_read", lambda peer: peer == 1 or read(peer))  # as if it sent faster than we read
        flooding.send(HEARTBEAT)
        dying.close()
        assert failed.wait(60)
        assert "lost rank 2" in str(mesh.state.failure)
        mesh.close()


def test_callbacks_of_a_lost_rank_run_without_the_lock_of_its_connection():
    """A callback may send to the lost rank. The other ranks are told over their own connections."""
    raised: SimpleQueue[Exception] = SimpleQueue()
    (first, full), (second, other) = unix_pair(), unix_pair()
    with full, other:
        other.settimeout(60)
        mesh = Mesh(0, {1: first, 2: second}, 1 << 20, lambda: None)

        def on_done(*_: object) -> None:
            try:
                mesh.send(1, FrameKind.MESSAGE, 7, "int8", memoryview(b"x"), time.monotonic() + 60)
            except Exception as error:
                raised.put(error)

        mesh.post(PostedRecv(FrameKind.MESSAGE, 1, 7, memoryview(bytearray(1)), "int8", on_done))
        with pytest.raises(CollectiveTimeoutError, match="Rank 1 did not take what rank 0 sent in time"):
            mesh.send(1, FrameKind.MESSAGE, 7, "int8", memoryview(bytes(16 << 20)), time.monotonic() + 0.5)
        error = raised.get(timeout=60)
        assert isinstance(error, RankLostError), repr(error)
        assert unpack(other.recv(HEADER_SIZE, socket.MSG_WAITALL), 1 << 20).kind is FrameKind.GROUP_FAILED
        mesh.close()


def test_nothing_is_sent_after_a_frame_that_an_interrupt_cut_off(monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with rank_0(unix_pair) as (mesh, theirs):
        with monkeypatch.context() as patch:
            patch.setattr(selectors.PollSelector, "select", interrupted)
            with pytest.raises(KeyboardInterrupt):
                mesh.send(1, FrameKind.MESSAGE, 7, "int8", memoryview(bytes(16 << 20)), time.monotonic() + 60)
        with pytest.raises(RankLostError, match="was cut off"):
            mesh.send(1, FrameKind.MESSAGE, 7, "int8", memoryview(b"x"), time.monotonic() + 60)
        count = 0
        while data := theirs.recv(1 << 20):
            assert not data.strip(b"\0") or not count
            count += len(data)
        assert 0 < count < 16 << 20


def test_a_callback_may_close_the_group():
    """The callback runs in the reading thread. Afterwards nothing may use the descriptors, which are closed."""
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    changes: list[None] = []
    (first, one), (second, two) = unix_pair(), unix_pair()
    with one, two:
        mesh = Mesh(0, {1: first, 2: second}, 1 << 20, lambda: changes.append(None))

        def on_done(_: PostedRecv, error: Exception | None) -> None:
            mesh.close()
            ended.put(error)

        mesh.post(PostedRecv(FrameKind.MESSAGE, 1, 7, memoryview(bytearray(4)), "int8", on_done))
        one.sendall(pack(FrameKind.MESSAGE, 7, "int8", 4) + b"good")
        assert ended.get(timeout=60) is None
        mesh._thread.join(60)
        assert not mesh._thread.is_alive()
        assert mesh.state.failure is None
        assert not changes


def test_a_partial_receive_fails_when_the_group_is_closed():
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    with rank_0(unix_pair) as (mesh, theirs):
        room = memoryview(bytearray(4))
        mesh.post(PostedRecv(FrameKind.MESSAGE, 1, 7, room, "int8", lambda _, error: ended.put(error)))
        theirs.sendall(pack(FrameKind.MESSAGE, 7, "int8", 4) + b"go")
        while room[1:2] != b"o":
            time.sleep(0.01)
    assert "destroyed on rank 0" in str(ended.get(timeout=60))


def test_tensor_of_another_collective_is_not_received() -> None:
    """Its header breaks the group. A thread that had begun its own collective before, and posted the receive after, got
    the tensor, and returned as if nothing were wrong.
    """
    received = torch.zeros(4, dtype=torch.int8)
    read: SimpleQueue[Exception | None] = SimpleQueue()
    with rank_0(unix_pair) as (mesh, theirs):
        call = mesh.state.begin("broadcast of int8 [4] from rank 1", 60)
        mesh.post(PostedRecv(FrameKind.MESSAGE, 1, 7, memoryview(b""), "int8", lambda _, error: read.put(error)))
        theirs.sendall(pack(FrameKind.COLLECTIVE, call.number, "allreduce of int8 [4] with SUM", 4) + b"oops")
        theirs.sendall(pack(FrameKind.MESSAGE, 7, "int8", 0))
        assert read.get(timeout=60) is None  # and so is what was sent before it
        messages = HostMessages(mesh, call)
        messages.expect(1, [received])
        with pytest.raises(CollectiveMismatchError, match="rank 1 called allreduce"):
            messages.wait()
        assert not received.any()


def test_receive_that_is_posted_while_a_rank_is_lost_does_not_stumble() -> None:
    """It raised ``RuntimeError: dictionary changed size during iteration``, which nobody expects."""
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    with rank_0(unix_pair) as (mesh, _):
        mesh._gone[8] = "its connection has closed"
        mesh._readers[8] = mesh._readers[9] = mesh._readers[1]
        gone = mesh._gone

        def lose_another(frame: Any, event: str, _: Any) -> Any:
            if frame.f_code.co_name == "<listcomp>" and frame.f_code.co_filename.endswith("mesh.py"):
                gone.setdefault(9, "its connection has closed")
            return lose_another

        sys.settrace(lose_another)
        try:
            mesh.post(PostedRecv(FrameKind.MESSAGE, 8, 7, memoryview(b""), "int8", lambda _, error: ended.put(error)))
        finally:
            sys.settrace(None)
        assert isinstance(ended.get(timeout=60), RankLostError)


def test_receive_that_gives_up_while_its_message_arrives_leaves_it_to_the_next_one() -> None:
    """The message was lost, so the next receive got the one behind it, and the memory of the first was written to."""
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    first, second = bytearray(8), bytearray(8)
    read = threading.Event()
    with rank_0(unix_pair) as (mesh, theirs):
        filled = FrameReader.filled

        def note(reader: FrameReader, count: int) -> None:
            filled(reader, count)
            if reader._message is not None and len(reader._target) == 4:
                read.set()

        mesh._readers[1].filled = note.__get__(mesh._readers[1])  # type: ignore[method-assign]
        recv = PostedRecv(FrameKind.MESSAGE, 1, 7, memoryview(first), "int8", lambda _, error: ended.put(error))
        mesh.post(recv)
        theirs.sendall(pack(FrameKind.MESSAGE, 7, "int8", 8) + b"half")
        assert read.wait(60)
        assert mesh.cancel(recv, CollectiveTimeoutError("it waited"))
        assert isinstance(ended.get(timeout=60), CollectiveTimeoutError)
        first[:] = b"my own!!"  # the program uses its memory for something else
        mesh.post(PostedRecv(FrameKind.MESSAGE, 1, 7, memoryview(second), "int8", lambda _, error: ended.put(error)))
        theirs.sendall(b"done" + pack(FrameKind.MESSAGE, 7, "int8", 8) + b"the next")
        assert ended.get(timeout=60) is None
        assert second == b"halfdone"
        assert first == b"my own!!"


def test_receive_that_gives_up_too_late_has_its_message() -> None:
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    room = bytearray(4)
    with rank_0(unix_pair) as (mesh, theirs):
        recv = PostedRecv(FrameKind.MESSAGE, 1, 7, memoryview(room), "int8", lambda _, error: ended.put(error))
        mesh.post(recv)
        theirs.sendall(pack(FrameKind.MESSAGE, 7, "int8", 4) + b"here")
        assert ended.get(timeout=60) is None
        assert not mesh.cancel(recv, CollectiveTimeoutError("it waited"))
        assert ended.empty()
        assert room == b"here"


def test_receive_that_has_its_message_is_let_go_of_at_once() -> None:
    """Not when the garbage collector comes: the two refer to the memory of tensors."""
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    with rank_0(unix_pair) as (mesh, theirs):
        recv = PostedRecv(FrameKind.MESSAGE, 1, 7, memoryview(bytearray(4)), "int8", lambda _, error: ended.put(error))
        mesh.post(recv)
        gone = weakref.ref(recv)
        gc.disable()
        try:
            theirs.sendall(pack(FrameKind.MESSAGE, 7, "int8", 4) + b"here")
            assert ended.get(timeout=60) is None
            del recv
            mesh.post(PostedRecv(FrameKind.MESSAGE, 1, 8, memoryview(b""), "int8", lambda _, error: ended.put(error)))
            theirs.sendall(pack(FrameKind.MESSAGE, 8, "int8", 0))
            assert ended.get(timeout=60) is None  # so the thread has nothing more to do with the first one
            assert gone() is None
        finally:
            gc.enable()
