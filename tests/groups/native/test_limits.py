"""Unexpected messages are kept up to a limit, and a rank that can't read any more tells all other ranks."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farprop.distributed.native import matching
from farprop.distributed.native.framing import HEADER_SIZE, FrameKind, pack, unpack
from farprop.distributed.native.matching import MessageMatcher, PostedRecv
from farprop.distributed.native.mesh import Mesh
from farprop.errors import CollectiveError, RankLostError
from tests.groups.kinds import default_group, finished_barrier
from tests.groups.native.layouts import environment
from tests.groups.store_group import job_store
from tests.support.workers import run_workers


def send_ahead(rank: int, size: int, count: int) -> None:
    with default_group("farprop", rank, size):
        x = torch.zeros(1, dtype=torch.int64)
        if rank == 0:
            for number in range(count):
                dist.isend(torch.tensor([number]), 1)
            dist.barrier()
        else:
            dist.barrier()  # all messages have arrived after this
            for number in range(count):
                dist.recv(x, 0)
                assert x.item() == number
            group: Any = dist.group.WORLD
            kept = group._mesh.matcher
            assert not any(kept._counts.values())
            assert not any(kept._bytes.values())


@pytest.mark.parametrize("layout", ["one", "tcp"])
def test_thousands_of_messages_can_be_sent_before_they_are_received(layout):
    run_workers(send_ahead, 2, (2, 20_000), environment(layout, 2))


def broadcast_ahead(rank: int, size: int, count: int) -> None:
    with default_group("farprop", rank, size):
        late = dist.distributed_c10d._get_default_store()
        if rank == 0:
            for number in range(count):
                dist.broadcast(torch.tensor([number]), 0)
            late.set("ahead", "")
        else:
            late.wait(["ahead"])
            x = torch.zeros(1, dtype=torch.int64)
            for number in range(count):
                dist.broadcast(x, 0)
                assert x.item() == number


def test_a_root_can_be_thousands_of_broadcasts_ahead():
    run_workers(broadcast_ahead, 2, (2, 20_000), environment("tcp", 2))


@contextmanager
def rank_0() -> Iterator[tuple[Mesh, socket.socket, socket.socket]]:
    """A mesh, and the other ends of its connections to ranks 1 and 2."""
    (first, one), (second, two) = socket.socketpair(), socket.socketpair()
    with one, two:
        one.settimeout(60)
        two.settimeout(60)
        mesh = Mesh(0, {1: first, 2: second}, 1 << 20, lambda: None)
        try:
            yield mesh, one, two
        finally:
            mesh.close()


def receive_group_failed(sock: socket.socket) -> str:
    header = sock.recv(HEADER_SIZE, socket.MSG_WAITALL)
    kind, length, _, _ = unpack(header, 1 << 20)
    assert kind is FrameKind.GROUP_FAILED
    return sock.recv(length, socket.MSG_WAITALL).decode()


@pytest.mark.parametrize("limit", ["number", "bytes"])
def test_too_many_unexpected_messages_fail_the_group_and_name_the_sender(limit, monkeypatch):
    if limit == "number":
        monkeypatch.setattr(matching, "_MAX_UNEXPECTED", 100)
    else:
        monkeypatch.setattr(matching, "_MAX_UNEXPECTED_BYTES", 100_000)
    length = 10 if limit == "number" else 20_000
    message = pack(FrameKind.MESSAGE, 7, "int8", length) + bytes(length)
    ended: SimpleQueue[Exception | None] = SimpleQueue()
    with rank_0() as (mesh, one, two):
        mesh.matcher._max_bytes = min(mesh.matcher._max_bytes, 100_000)
        room = bytearray(4)
        mesh.post(PostedRecv(FrameKind.MESSAGE, 1, 9, memoryview(room), "int8", lambda _, error: ended.put(error)))
        for _ in range(6 if limit == "bytes" else 101):
            one.sendall(message)
        for sock in (one, two):
            text = receive_group_failed(sock)
            assert "CollectiveError Rank 0 can't read any more from rank 1" in text
            assert "that rank 1 has sent were not received" in text
        assert one.recv(1) == b""
        assert isinstance(ended.get(timeout=60), RankLostError)
        assert mesh._thread.is_alive()
        assert len(mesh.matcher._unexpected) == (5 if limit == "bytes" else 100)
        # The other connection still works.
        mesh.post(PostedRecv(FrameKind.MESSAGE, 2, 9, memoryview(room), "int8", lambda _, error: ended.put(error)))
        two.sendall(pack(FrameKind.MESSAGE, 9, "int8", 4) + b"good")
        assert ended.get(timeout=60) is None
        assert room == b"good"


def out_of_memory(rank: int, size: int) -> str:
    with default_group("farprop", rank, size):
        finished_barrier()
        if rank == 0:

            def no_memory(*_: object) -> None:
                raise MemoryError("none left")

            MessageMatcher.begin = no_memory  # type: ignore[method-assign]
        with pytest.raises(CollectiveError) as caught:
            for _ in range(10):
                dist.all_reduce(torch.ones(3))
        with pytest.raises(CollectiveError):
            dist.barrier()
        return str(caught.value)


@pytest.mark.parametrize("layout", ["tcp", "two"])
def test_a_rank_out_of_memory_fails_the_group_on_all_ranks(layout):
    texts = run_workers(out_of_memory, 3, (3,), environment(layout, 3))
    assert all("MemoryError: none left" in text for text in texts), texts
    assert all("Rank 0 can't read any more from rank" in text for text in texts), texts


def test_a_reading_thread_that_dies_fails_the_group(monkeypatch):
    def fails() -> None:
        raise MemoryError("at the worst moment")

    ended: SimpleQueue[Exception | None] = SimpleQueue()
    with rank_0() as (mesh, one, two):
        room = memoryview(bytearray(4))
        for peer in (1, 2):
            mesh.post(PostedRecv(FrameKind.MESSAGE, peer, 9, room, "int8", lambda _, error: ended.put(error)))
        monkeypatch.setattr(mesh, "_probe_peers", fails)
        monkeypatch.setattr(mesh._selector, "select", lambda _: fails())
        one.sendall(pack(FrameKind.MESSAGE, 8, "int8", 1) + b"x")
        for _ in range(2):
            assert isinstance(ended.get(timeout=60), RankLostError)
        assert "at the worst moment" in str(mesh.state.failure)
        for sock in (one, two):
            assert "at the worst moment" in receive_group_failed(sock)
            assert sock.recv(1) == b""


def too_large_for_rank_1(rank: int, size: int) -> str:
    dist.init_process_group("farprop", store=job_store(rank, size), rank=rank, world_size=size)
    if rank == 0:
        with pytest.raises(CollectiveError) as caught:
            dist.send(torch.zeros(2_000_000, dtype=torch.uint8), 1)
        dist.send(torch.ones(3), 1)
        text = str(caught.value)
    else:
        tensor = torch.zeros(3)
        dist.recv(tensor, 0)
        text = str(tensor.tolist())
    dist.destroy_process_group()
    return text


def test_a_message_over_the_receivers_limit_raises_at_the_sender():
    environments = [{"FARPROP_TRANSPORT": "tcp"}, {"FARPROP_TRANSPORT": "tcp", "FARPROP_MAX_MESSAGE_BYTES": "1000000"}]
    texts = run_workers(too_large_for_rank_1, 2, (2,), environments)
    assert "Rank 1 takes no messages above its FARPROP_MAX_MESSAGE_BYTES=1000000" in texts[0]
    assert texts[1] == "[1.0, 1.0, 1.0]"
