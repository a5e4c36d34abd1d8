"""Frames: whole, byte by byte, with trailing data, and garbage."""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farprop.errors import ProtocolError
from farprop.wire import frames
from farprop.wire.frames import FrameReader
from farprop.wire.message import (
    ANSWER,
    CANCEL,
    FORGET,
    HEADER,
    IN_REQUEST,
    NOTICE,
    REQUEST,
    SYSTEM,
    TRACED,
    Message,
    ParcelPart,
)
from tests.support.raw_messages import pack

CAP = 1 << 30


def feed(reader: FrameReader, data: bytes, pieces: list[int]) -> list[Message]:
    """Feed ``data`` to the reader like a socket, in pieces of limited size."""
    got: list[Message] = []
    at = turn = 0
    while at < len(data):
        target = reader.target
        assert len(target) > 0
        count = min(len(target), len(data) - at, pieces[turn % len(pieces)])
        target[:count] = data[at : at + count]
        got += reader.received(count)
        at += count
        turn += 1
    return got


def frame_bytes(frame: dict[str, Any], inline: list[bytes]) -> bytes:
    return pack(**frame) + b"".join(inline)


@st.composite
def frame_and_bytes(draw: Any) -> tuple[dict[str, Any], list[bytes]]:
    sizes = draw(st.lists(st.sampled_from([1, 10, 70000]), max_size=3))
    table, inline = [], []
    for index, size in enumerate(sizes):
        if draw(st.booleans()):
            table.append((size, index + 1))
        else:
            table.append((size, 0))
            inline.append(random.Random(size).randbytes(size))
    frame = {
        "kind": draw(st.sampled_from([REQUEST, ANSWER, NOTICE, CANCEL])),
        "flags": draw(st.sampled_from([0, SYSTEM, TRACED, FORGET])),
        "call_id": draw(st.integers(0, 2**64 - 1)),
        "seconds": draw(st.floats(0, 1e6)),
        "name": draw(st.binary(max_size=50)),
        "body": b"m" * draw(st.sampled_from([0, 1, 100, 65536, 200000])),
        "table": table,
        "returned": draw(st.lists(st.integers(0, 2**32 - 1), max_size=5)),
    }
    return frame, inline


@settings(max_examples=150, deadline=None)
@given(
    messages=st.lists(frame_and_bytes(), min_size=1, max_size=4),
    pieces=st.lists(st.sampled_from([1, 7, 31, 32, 33, 4096, 1 << 20]), min_size=1, max_size=5),
)
def test_frames_parse_however_the_stream_is_split(
    messages: list[tuple[dict[str, Any], list[bytes]]], pieces: list[int]
) -> None:
    if 1 in pieces or 7 in pieces:
        pieces = [*pieces, 4096]
    data = b"".join(frame_bytes(*message) for message in messages)
    got = feed(FrameReader(CAP), data, pieces)
    assert len(got) == len(messages)
    for frame, (sent, inline) in zip(got, messages, strict=True):
        assert (frame.kind, frame.flags, frame.call_id) == (sent["kind"], sent["flags"], sent["call_id"])
        assert frame.seconds == (sent["seconds"] or None)
        assert frame.name == sent["name"]
        assert bytes(frame.payload) == sent["body"]
        assert list(frame.returned_segments) == sent["returned"]
        assert [bytes(b) for b in frame.buffers if isinstance(b, memoryview)] == inline
        assert [b for b in frame.buffers if isinstance(b, tuple)] == [(n, s) for s, n in sent["table"] if n]


def test_frames_parse_byte_by_byte() -> None:
    data = pack(REQUEST, 0, 5, 1.5, b"mod:f", b"meta", [(3, 0)]) + b"abc" + pack(ANSWER, 0, 6, 0.0, b"", b"x")
    first, second = feed(FrameReader(CAP), data, [1])
    assert (first.name, bytes(first.payload), first.buffers) == (b"mod:f", b"meta", [bytearray(b"abc")])
    assert (second.call_id, bytes(second.payload)) == (6, b"x")


@settings(max_examples=300, deadline=None)
@given(data=st.binary(min_size=32, max_size=300), pieces=st.lists(st.integers(1, 64), min_size=1, max_size=3))
def test_garbage_parses_or_is_a_protocol_error(data: bytes, pieces: list[int]) -> None:
    reader = FrameReader(10_000)
    try:
        for frame in feed(reader, data, pieces):
            assert len(frame.payload) <= 10_000
    except ProtocolError:
        pass


@settings(max_examples=300, deadline=None)
@given(message=frame_and_bytes(), flips=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1))
def test_damaged_frames_parse_or_are_protocol_errors(
    message: tuple[dict[str, Any], list[bytes]], flips: list[tuple[int, int]]
) -> None:
    data = bytearray(frame_bytes(*message))
    for at, value in flips:
        data[at % len(data)] = value
    try:
        feed(FrameReader(1 << 20), bytes(data), [4096])
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": 0}, "unknown message kind"),
        ({"kind": 99}, "unknown message kind"),
        ({"seconds": -1.0}, "deadline"),
        ({"seconds": float("nan")}, "deadline"),
        ({"seconds": float("inf")}, "deadline"),
        ({"table": [(2000, 0)]}, "2000 bytes"),
        ({"table": [(0, 0)]}, "0 bytes"),
        ({"table": [(2**63, 0)]}, "bytes"),
        ({"table": [(600, 0), (600, 1)]}, "600 bytes"),
    ],
)
def test_protocol_error_says_which_rule_was_broken(change: dict[str, Any], reason: str) -> None:
    frame = {
        "kind": REQUEST,
        "flags": 0,
        "call_id": 1,
        "seconds": 0.0,
        "name": b"",
        "body": b"",
        "table": (),
        "returned": (),
    }
    with pytest.raises(ProtocolError, match=reason):
        feed(FrameReader(1000), pack(**{**frame, **change}), [4096])  # type: ignore[arg-type]


def test_parts_of_the_last_buffer_count_once() -> None:
    parts = [ParcelPart(IN_REQUEST, 0, 600).row, ParcelPart(IN_REQUEST, 0, 600).row]
    frame = {"kind": REQUEST, "flags": 0, "call_id": 1, "seconds": 0.0, "name": b"", "body": b""}
    (message,) = feed(FrameReader(1000), pack(**frame, table=[*parts, (700, 3)]), [4096])  # type: ignore[arg-type]
    assert len(message.buffers) == 3
    with pytest.raises(ProtocolError, match="larger than FARPROP_MAX_MESSAGE_BYTES"):
        feed(FrameReader(1000), pack(**frame, table=[*parts, (1001, 3)]), [4096])  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="larger than FARPROP_MAX_MESSAGE_BYTES"):
        other = [ParcelPart(IN_REQUEST + 1, 0, 600).row] * 2
        feed(FrameReader(1000), pack(**frame, table=other), [4096])  # type: ignore[arg-type]


def test_length_over_the_limit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(pack(REQUEST, 0, 1, 0.0, b"", b""))
    struct.pack_into("<Q", data, HEADER.size - 8, 1 << 40)
    reader = FrameReader(1 << 20)

    def no_room(_: int) -> memoryview:
        raise AssertionError("allocated")

    monkeypatch.setattr(frames, "room_for", no_room)
    with pytest.raises(ProtocolError, match="larger than FARPROP_MAX_MESSAGE_BYTES"):
        feed(reader, bytes(data), [4096])


def test_many_small_frames_with_buffers_in_one_read() -> None:
    """One read returns all complete frames: none waits for the next one."""
    data = b"".join(pack(REQUEST, 0, i, 0.0, b"", b"", [(1, 0)]) + bytes([i % 256]) for i in range(1300))
    reader = FrameReader(1 << 20)
    found: list[Message] = []
    at = 0
    while at < len(data):
        target = reader.target
        count = min(len(target), len(data) - at)
        target[:count] = data[at : at + count]
        at += count
        found += reader.received(count)
    assert [(frame.call_id, bytes(frame.buffers[0])) for frame in found] == [(i, bytes([i % 256])) for i in range(1300)]
