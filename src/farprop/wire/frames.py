"""Framing: cuts a stream of bytes into messages. No sockets.

Rules that hold here:

- Every length is checked against the limit before anything is allocated for it, and memory grows as bytes arrive.
- Garbage either parses or raises ``ProtocolError``, never anything else.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy

from farprop.errors import ProtocolError
from farprop.wire.message import (
    ALL_FLAGS,
    BUFFER,
    CANCEL,
    HEADER,
    MAX_SECONDS,
    REQUEST,
    Message,
    check_header,
    is_in_request,
)

_SMALL = 64 * 1024
_HEADER_SIZE = HEADER.size
_Header = tuple[int, int, int, int, int, int, float, int]


class FrameReader:
    """Turns received bytes into messages.

    ``target`` is the memory to receive into next. After n bytes were read into it, ``received(n)`` returns the messages
    that are complete. Large bodies and buffers are received directly into memory of their own.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.target = self._small = memoryview(bytearray(_SMALL))
        self._filled = 0
        self._rest = b""  # bytes received after a message whose inline buffers have no memory yet
        # The incomplete message, if it doesn't fit the small buffer.
        self._head: _Header | None = None
        self._piece: memoryview | None = None  # the memory being filled: its body, or one of its buffers
        self._piece_filled = 0
        self._message: Message | None = None  # set while its buffers are received
        self._next_buffer = 0

    def _next_target(self) -> memoryview:
        if self._piece is not None:
            return self._piece[self._piece_filled :]
        return self._small[self._filled :] if self._filled else self._small

    def received(self, count: int) -> list[Message]:
        """Parse ``count`` bytes that were read into ``target``.

        Returns:
            The messages that are now complete.

        Raises:
            ProtocolError: the bytes are malformed.
        """
        if self._piece is None and not self._filled and count >= _HEADER_SIZE:
            # The common case: exactly one small message.
            small = self._small
            kind, flags, buffers, name_length, returned, call_id, seconds, length = HEADER.unpack_from(small)
            if (
                not (buffers or returned or flags & ~ALL_FLAGS)
                and count == _HEADER_SIZE + name_length + length
                and count <= self._max_bytes
                and REQUEST <= kind <= CANCEL
                and 0.0 <= seconds <= MAX_SECONDS
            ):
                at = _HEADER_SIZE + name_length
                name = bytes(small[_HEADER_SIZE:at])
                return [Message(bytes(small[at:count]), [], None, flags, (), kind, call_id, seconds or None, name)]
        messages: list[Message] = []
        if self._piece is not None:
            self._piece_filled += count
            if self._piece_filled == len(self._piece):
                messages = self._piece_done(self._piece)
        else:
            self._filled += count
            messages = self._parse_small()
            while self._rest:
                self._pour(messages)
        self.target = self._next_target()
        return messages

    def _parse_small(self) -> list[Message]:
        messages: list[Message] = []
        small, filled, at = self._small, self._filled, 0
        while filled - at >= _HEADER_SIZE:
            head = HEADER.unpack_from(small, at)
            body = self._check(head)
            end = at + _HEADER_SIZE + body
            if end > filled:
                if _HEADER_SIZE + body > _SMALL:
                    # Too large for the small buffer: its body gets memory of its own.
                    have = small[at + _HEADER_SIZE : filled]
                    own = room_for(body)
                    own[: len(have)] = have
                    self._filled = 0
                    self._head, self._piece, self._piece_filled = head, own, len(have)
                    return messages
                break
            if not head[2] and not head[4]:
                kind, flags, _, name, _, call_id, seconds, _ = head
                body_at = at + _HEADER_SIZE + name
                name_bytes = bytes(small[at + _HEADER_SIZE : body_at])
                payload = bytes(small[body_at:end])
                messages.append(Message(payload, [], None, flags, (), kind, call_id, seconds or None, name_bytes))
                at = end
                continue
            message = self._message_of(head, bytes(small[at + _HEADER_SIZE : end]))
            at = end
            if self._expect_buffer(message, 0):
                self._rest = bytes(small[at:filled])
                self._filled = 0
                return messages
            messages.append(message)
        if at:
            left = filled - at
            small[:left] = small[at:filled]
            filled = left
        self._filled = filled
        return messages

    def _pour(self, messages: list[Message]) -> None:
        """Move the remaining bytes to where they belong, as if they had just been received."""
        data, self._rest = self._rest, b""
        at = 0
        while at < len(data):
            into = self._next_target()
            count = min(len(into), len(data) - at)
            into[:count] = data[at : at + count]
            at += count
            if self._piece is None:
                self._filled += count
                messages += self._parse_small()
                if self._rest:
                    self._rest += data[at:]
                    return
            else:
                self._piece_filled += count
                if self._piece_filled == len(self._piece):
                    messages += self._piece_done(self._piece)

    def _expect_buffer(self, message: Message, first: int) -> bool:
        """Allocate memory for the message's next inline buffer; False if there is none.

        One at a time, because a peer could announce many buffers and never send them.
        """
        for index in range(first, len(message.buffers)):
            segment, length = message.buffers[index]
            if not segment:
                message.buffers[index] = self._piece = room_for(length)
                self._piece_filled = 0
                self._message, self._next_buffer = message, index + 1
                return True
        self._message = self._piece = None
        return False

    def _piece_done(self, piece: memoryview) -> list[Message]:
        if self._message is None:
            assert self._head is not None
            message, first = self._message_of(self._head, piece), 0
            self._head = None
        else:
            message, first = self._message, self._next_buffer
        return [] if self._expect_buffer(message, first) else [message]

    def _check(self, head: _Header) -> int:
        """Check the header; returns the length of the body."""
        kind, flags, buffers, name, returned, _, seconds, length = head
        check_header(kind, flags, seconds)
        body = name + 4 * returned + BUFFER.size * buffers + length
        if body > self._max_bytes:
            raise ProtocolError(f"a message of {body} bytes is larger than FARPROP_MAX_MESSAGE_BYTES={self._max_bytes}")
        return body

    def _message_of(self, head: _Header, body: bytes | memoryview) -> Message:
        kind, flags, buffer_count, name_length, returned_count, call_id, seconds, total = head
        name = bytes(body[:name_length])
        at = name_length
        returned: tuple[int, ...] = struct.unpack_from(f"<{returned_count}I", body, at)
        at += 4 * returned_count
        buffers: list[Any] = []
        for _ in range(buffer_count):
            length, segment = BUFFER.unpack_from(body, at)
            at += BUFFER.size
            if not is_in_request(segment):
                total += length
            if total > self._max_bytes or not length:
                raise ProtocolError(
                    f"a buffer of {length} bytes is empty or larger than FARPROP_MAX_MESSAGE_BYTES={self._max_bytes}"
                )
            buffers.append((segment, length))
        payload = memoryview(body)[at:]
        return Message(payload, buffers, None, flags, (), kind, call_id, seconds or None, name, returned)


def room_for(length: int) -> memoryview:
    """Writable memory whose pages the system allocates when they are written to.

    A peer can announce any length at no cost, so the announcement must not use memory. (A ``bytearray`` is zeroed,
    which allocates all of it at once.)
    """
    try:
        return numpy.empty(length, numpy.uint8).data
    except (MemoryError, ValueError) as error:
        raise ProtocolError(f"a header announces {length} bytes, and there is no memory for them") from error
