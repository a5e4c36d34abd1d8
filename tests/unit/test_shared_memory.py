"""Shared memory between a sender and a receiver, in one process."""

from __future__ import annotations

import gc
import os
import random
from pathlib import Path

import pytest
import torch

from farprop.errors import ProtocolError
from farprop.transport.shared_memory import HALF_LIFE, FdChannel, SegmentPool, ShmReceiver, ShmSender

KIB = 1024


class Pair:
    """A sender and a receiver, with a descriptor channel between them."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.timers: list[float] = []
        self.pool = SegmentPool(limit, self.timers.append)
        self.sender = ShmSender(self.pool)
        self.notes = 0
        self.receiver = ShmReceiver(self.note)
        self.sender.fd_channel, theirs = FdChannel.pair()
        self.receiver.fd_channel = FdChannel(theirs)

    def note(self) -> None:
        self.notes += 1

    def send(self, data: bytes) -> memoryview:
        segment = self.sender.lend(memoryview(bytearray(data)))
        assert segment is not None
        return self.receiver.borrow(segment.number, len(data))

    def settle(self) -> None:
        self.sender.take_back(self.receiver.take_returned(1000))
        self.receiver.forget([self.sender.dropped.popleft() for _ in range(len(self.sender.dropped))])

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        assert self.sender.fd_channel is not None
        assert self.receiver.fd_channel is not None
        self.sender.fd_channel.close()
        self.receiver.fd_channel.close()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:farprop")


def burst(pair: Pair, count: int) -> None:
    """Lend so many segments of a MiB at the same time, and get them back."""
    held = [pair.send(bytes([number]) * KIB * KIB) for number in range(count)]
    assert len(held) == count
    held.clear()
    pair.sender.take_back(pair.receiver.take_returned(1000))


def test_lent_segment_is_not_reused_until_it_is_returned() -> None:
    pair = Pair()
    chance = random.Random(1)
    held: dict[int, tuple[memoryview, bytes]] = {}
    for turn in range(300):
        data = chance.randbytes(chance.choice([64, 100, 300]) * KIB)
        held[turn] = pair.send(data), data
        if len(held) > 5:
            held.pop(chance.choice(list(held)))
        if chance.random() < 0.3:
            pair.settle()
        for view, expected in held.values():
            assert view == expected
        pair.pool.validate()
    assert mappings() < 100  # segments are reused; with one for each message there would be 600
    held.clear()
    del view
    pair.settle()
    assert pair.sender.lent_bytes == 0
    pair.close()
    assert mappings() == 0


def test_segment_is_returned_when_its_last_tensor_is_gone() -> None:
    pair = Pair()
    tensor = torch.frombuffer(pair.send(b"\1" * 100 * KIB), dtype=torch.uint8)
    part = tensor[5:10]
    del tensor
    gc.collect()
    assert not pair.receiver.returned
    assert part.tolist() == [1] * 5
    del part
    assert list(pair.receiver.returned) == [1]
    pair.settle()
    pair.close()


def test_pool_drops_free_segments_over_its_limit() -> None:
    pair = Pair(limit=500 * KIB)
    views = [pair.send(bytes(200 * KIB)) for _ in range(5)]
    views.clear()
    pair.settle()
    assert pair.pool.free_bytes <= 500 * KIB
    assert mappings() <= 4  # two segments, on both sides
    pair.close()
    assert pair.pool.free_bytes == 0


def test_receiver_can_read_a_segment_after_the_sender_closes() -> None:
    pair = Pair()
    view = pair.send(b"x" * 70 * KIB)
    pair.close()
    assert view[-1] == ord("x")
    assert pair.pool.free_bytes == 0
    del view
    assert mappings() == 0


def test_return_of_a_large_segment_notifies() -> None:
    pair = Pair()
    view = pair.send(bytes(17 << 20))
    assert pair.notes == 0
    del view
    assert pair.notes == 1
    pair.settle()
    pair.close()


def test_nonsense_is_a_protocol_error() -> None:
    pair = Pair()
    with pytest.raises(ProtocolError, match="never passed"):
        pair.receiver.borrow(9, 10)
    with pytest.raises(ProtocolError, match="gave back"):
        pair.sender.take_back([4])
    view = pair.send(bytes(64 * KIB))
    with pytest.raises(ProtocolError, match="lent already"):
        pair.receiver.borrow(1, 10)
    del view
    with pytest.raises(ProtocolError, match="shorter"):
        pair.receiver.borrow(1, 1 << 30)
    assert pair.sender.fd_channel is not None
    null = os.open("/dev/null", os.O_RDONLY)
    assert pair.sender.fd_channel.send(7, null)
    os.close(null)
    with pytest.raises(ProtocolError, match="can't be mapped"):
        pair.receiver.borrow(7, 10)
    pair.settle()
    pair.close()


def test_failed_allocation_returns_none() -> None:
    pair = Pair()
    assert pair.sender._take(1 << 62) is None
    pair.close()


def test_lend_returns_none_when_the_fd_channel_is_full_and_segments_arrive_in_any_order() -> None:
    pair = Pair()
    segments = []
    while (segment := pair.sender.lend(memoryview(bytearray(64 * KIB)))) is not None:
        segments.append(segment)
    assert len(segments) > 50
    for segment in reversed(segments):
        assert pair.receiver.borrow(segment.number, 10).nbytes == 10
    assert pair.sender.lend(memoryview(bytearray(64 * KIB))) is not None
    pair.close()


def test_free_segments_have_a_half_life() -> None:
    pair = Pair()
    burst(pair, 96)
    free = []
    while pair.timers:
        assert pair.timers == [HALF_LIFE]  # one timer at a time
        pair.timers.clear()
        assert pair.pool.halve()
        free.append(pair.pool.free_bytes >> 20)
        pair.pool.validate()
    assert free[0] >= 80  # at first, only those count as unneeded that were free at the begin
    assert free[1:] == [free[0] // 2, free[0] // 4, 16]
    assert pair.timers == []  # a small pool stays, and no timer runs for it
    burst(pair, 8)
    assert pair.timers == []
    pair.close()


def test_segments_that_are_in_use_again_and_again_stay() -> None:
    pair = Pair()
    for _ in range(5):
        burst(pair, 64)
        pair.timers.clear()
        assert not pair.pool.halve() or pair.pool.free_bytes >= 40 << 20
    burst(pair, 64)
    before = pair.pool.free_bytes
    pair.pool.halve()
    assert pair.pool.free_bytes == before
    pair.close()


def shared_bytes() -> int:
    """Bytes of shared memory in use, of all of this process's segments."""
    total = 0
    counts = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = "memfd:farprop" in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * KIB
    return total


def test_memory_of_dropped_segments_is_free_before_the_receiver_unmaps_them() -> None:
    pair = Pair()
    burst(pair, 64)
    pair.pool.halve()
    for _ in range(10):
        pair.pool.halve()
    assert shared_bytes() <= 2 * 16 << 20  # both sides of the few that stay
    assert mappings() > 40  # the receiver's
    pair.settle()
    assert mappings() <= 32
    pair.close()
