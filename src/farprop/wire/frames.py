"""Frames: how messages lie in a stream of bytes. Bytes in, frames out; no socket here.

A frame is a header of fixed size, then a body (the function's name, the segments given back, the table of
buffers, the pickle), then the buffers that travel inline. Rules that hold here:

- Every length is checked against the cap before anything is allocated for it, and memory grows as bytes come.
- Garbage either parses or raises ``ProtocolError``, never anything else.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from farprop.errors import ProtocolError
from farprop.wire.room import room_for

REQUEST = 1  # run a function
ANSWER = 2  # its value
FAILURE = 3  # its exception
NOTICE = 4  # segments given back, or (with FORGET) segments to unmap; no call
_KINDS = frozenset((REQUEST, ANSWER, FAILURE, NOTICE))

SYSTEM = 1  # flag of a request: farprop's own, not counted as work of the user
PROFILED = 2  # flag of a request: record the operators it runs; of an answer: their record is beside the value
FORGET = 4  # flag of a notice: the numbers are segments that the sender dropped
PLAIN = 8  # flag of a request or an answer: the pickle is of wire/plain.py
FORKS = 16  # flag of a request or an answer: references are listed in front of the pickle
REMOTE = 32  # flag of a request: keep the value, which the first of those references is to
CONTEXT = 64  # flag of a request or an answer: of an autograd context, which stands in front of the pickle
_FLAGS = SYSTEM | PROFILED | FORGET | PLAIN | FORKS | REMOTE | CONTEXT

# kind, flags, buffers, name length, give-backs, call id, seconds left (0: no deadline), pickle length
_HEADER = struct.Struct("<BBHHHQdQ")
HEADER_SIZE = _HEADER.size
# length, segment (0: the bytes follow inline)
_BUFFER = struct.Struct("<QQ")
MAX_BUFFERS = MAX_GIVES = 0xFFFF
MAX_SECONDS = 10 * 366 * 86400.0

_SMALL = 64 * 1024


class Frame:
    """One received frame. ``buffers`` holds memory, or (as read from the stream) a segment's number and a length;
    ``arrivals`` what the runtime made of the references in front of the pickle.
    """

    __slots__ = ("arrivals", "buffers", "call_id", "flags", "gives", "kind", "meta", "name", "seconds")

    def __init__(
        self,
        kind: int,
        flags: int,
        call_id: int,
        seconds: float,
        name: bytes,
        meta: bytes | memoryview,
        gives: Sequence[int],
        buffers: list[Any],
    ) -> None:
        self.kind = kind
        self.flags = flags
        self.call_id = call_id
        self.seconds = seconds
        self.name = name
        self.meta = meta
        self.gives = gives
        self.buffers = buffers
        self.arrivals: Any = None


def pack(
    kind: int,
    flags: int,
    call_id: int,
    seconds: float,
    name: bytes,
    meta: bytes,
    table: Sequence[tuple[int, int]] = (),
    gives: Sequence[int] = (),
) -> bytes:
    """Everything of a frame but its inline buffers. ``table`` has (length, segment) for each buffer."""
    head = _HEADER.pack(kind, flags, len(table), len(name), len(gives), call_id, seconds, len(meta))
    if not table and not gives:
        return head + name + meta
    return b"".join((head, name, struct.pack(f"<{len(gives)}I", *gives), *[_BUFFER.pack(*row) for row in table], meta))


class FrameReader:
    """Turns received bytes into frames.

    ``target()`` is the memory to receive into next; ``received(n)`` says that n bytes were put there and
    returns the frames that are complete. Large bodies and buffers are received straight into their own memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._small = memoryview(bytearray(_SMALL))
        self._filled = 0
        self._rest = b""  # received behind a frame whose buffers had no room yet
        # The frame whose body or inline buffers are still coming, when it doesn't fit the small buffer.
        self._head: tuple[int, int, int, int, int, int, float, int] | None = None
        self._piece: memoryview | None = None  # its body, or one of its buffers: the memory that is being filled
        self._piece_filled = 0
        self._frame: Frame | None = None  # when it is the buffers that come
        self._next_buffer = 0

    def target(self) -> memoryview:
        if self._piece is not None:
            return self._piece[self._piece_filled :]
        return self._small[self._filled :] if self._filled else self._small

    def received(self, count: int) -> list[Frame]:
        if self._piece is not None:
            self._piece_filled += count
            return self._piece_done(self._piece) if self._piece_filled == len(self._piece) else []
        if not self._filled and count >= HEADER_SIZE:
            # Almost every message: one small frame, whole, and nothing after it.
            head = _HEADER.unpack_from(self._small)
            kind, flags, buffers, name, gives, call_id, seconds, meta = head
            if not buffers and not gives and count == HEADER_SIZE + name + meta:
                self._check(head)
                at = HEADER_SIZE + name
                small = self._small
                return [
                    Frame(kind, flags, call_id, seconds, bytes(small[HEADER_SIZE:at]), bytes(small[at:count]), (), [])
                ]
        self._filled += count
        frames = self._parse_small()
        while self._rest:
            self._pour(frames)
        return frames

    def _parse_small(self) -> list[Frame]:
        frames: list[Frame] = []
        small, filled, at = self._small, self._filled, 0
        while filled - at >= HEADER_SIZE:
            head = _HEADER.unpack_from(small, at)
            body = self._check(head)
            end = at + HEADER_SIZE + body
            if end > filled:
                if HEADER_SIZE + body > _SMALL:
                    # Too large for the small buffer: its body gets memory of its own.
                    have = small[at + HEADER_SIZE : filled]
                    own = room_for(body)
                    own[: len(have)] = have
                    self._filled = 0
                    self._head, self._piece, self._piece_filled = head, own, len(have)
                    return frames
                break
            if not head[2] and not head[4]:
                kind, flags, _, name, _, call_id, seconds, _ = head
                body_at = at + HEADER_SIZE + name
                name_bytes = bytes(small[at + HEADER_SIZE : body_at])
                frames.append(Frame(kind, flags, call_id, seconds, name_bytes, bytes(small[body_at:end]), (), []))
                at = end
                continue
            frame = self._frame_of(head, bytes(small[at + HEADER_SIZE : end]))
            at = end
            if self._expect_buffer(frame, 0):
                self._rest = bytes(small[at:filled])
                self._filled = 0
                return frames
            frames.append(frame)
        if at:
            left = filled - at
            small[:left] = small[at:filled]
            filled = left
        self._filled = filled
        return frames

    def _pour(self, frames: list[Frame]) -> None:
        """The rest of what was received goes where it belongs, as if it had just come."""
        data, self._rest = self._rest, b""
        at = 0
        while at < len(data):
            into = self.target()
            count = min(len(into), len(data) - at)
            into[:count] = data[at : at + count]
            at += count
            if self._piece is None:
                self._filled += count
                frames += self._parse_small()
                if self._rest:
                    self._rest += data[at:]
                    return
            else:
                self._piece_filled += count
                if self._piece_filled == len(self._piece):
                    frames += self._piece_done(self._piece)

    def _expect_buffer(self, frame: Frame, first: int) -> bool:
        """Make room for the next of the frame's buffers that comes inline; False if there is none. One at a time: many
        that were only announced would be much memory, too.
        """
        for index in range(first, len(frame.buffers)):
            segment, length = frame.buffers[index]
            if not segment:
                frame.buffers[index] = self._piece = room_for(length)
                self._piece_filled = 0
                self._frame, self._next_buffer = frame, index + 1
                return True
        self._frame = self._piece = None
        return False

    def _piece_done(self, piece: memoryview) -> list[Frame]:
        if self._frame is None:
            assert self._head is not None
            frame, first = self._frame_of(self._head, piece), 0
            self._head = None
        else:
            frame, first = self._frame, self._next_buffer
        return [] if self._expect_buffer(frame, first) else [frame]

    def _check(self, head: tuple[int, int, int, int, int, int, float, int]) -> int:
        """The length of the body, after the header has been found to be sane."""
        kind, flags, buffers, name, gives, _, seconds, meta = head
        if kind not in _KINDS or flags & ~_FLAGS:
            raise ProtocolError(f"unknown frame kind {kind} or flags {flags:#x}")
        if not 0.0 <= seconds <= MAX_SECONDS:
            raise ProtocolError(f"a deadline of {seconds} seconds makes no sense")
        body = name + 4 * gives + _BUFFER.size * buffers + meta
        if body > self._max_bytes:
            raise ProtocolError(f"a frame of {body} bytes is larger than FARPROP_MAX_MESSAGE_BYTES={self._max_bytes}")
        return body

    def _frame_of(self, head: tuple[int, int, int, int, int, int, float, int], body: bytes | memoryview) -> Frame:
        kind, flags, buffer_count, name_length, give_count, call_id, seconds, meta_length = head
        if not buffer_count and not give_count:
            return Frame(
                kind, flags, call_id, seconds, bytes(body[:name_length]), memoryview(body)[name_length:], (), []
            )
        at = name_length
        gives = struct.unpack_from(f"<{give_count}I", body, at)
        at += 4 * give_count
        total = meta_length
        buffers: list[Any] = []
        for _ in range(buffer_count):
            length, segment = _BUFFER.unpack_from(body, at)
            at += _BUFFER.size
            total += length
            if total > self._max_bytes or not length:
                raise ProtocolError(
                    f"a buffer of {length} bytes is empty or larger than FARPROP_MAX_MESSAGE_BYTES={self._max_bytes}"
                )
            buffers.append((segment, length))
        return Frame(kind, flags, call_id, seconds, bytes(body[:name_length]), memoryview(body)[at:], gives, buffers)
