"""What ranks send each other: a header of fixed size, a text, and the bytes of a tensor.

Calls have a format of their own (``wire.frames``); docs/design.md says why. Both check every length before they
allocate memory for it, and both take memory that the system provides as it is written (``room_for``).
"""

from __future__ import annotations

import struct
import threading
from enum import IntEnum
from typing import NamedTuple, Protocol

from farprop.distributed.native.group_state import GroupState
from farprop.distributed.native.matching import IncomingMessage, MessageMatcher
from farprop.errors import ProtocolError
from farprop.wire.frames import room_for

_HEADER = struct.Struct("<BxHxxxxqQ")
HEADER_SIZE = _HEADER.size
MAX_TEXT = 4096
HEARTBEAT = b"\0"  # sent between two frames, whose first byte it can't be; it carries nothing


class FrameKind(IntEnum):
    MESSAGE = 1
    """The tensor of a ``send``; the key is the tag, the text the dtype."""
    COLLECTIVE = 2
    """A tensor of a collective; the key is the collective's number, the text its fingerprint."""
    FINGERPRINT = 3
    """The collective that the sender waits in: number and fingerprint, no tensor."""
    GROUP_FAILED = 4
    """The group is broken; the text says why."""
    GOODBYE = 5
    """The sender leaves the group; the text says what has broken the group, if it is broken. Nothing comes after it."""
    PROGRAM_FAILED = 6
    """The sender's program ends with an exception; the text says who failed first. Nothing comes after it."""


class FrameHeader(NamedTuple):
    """A frame's header; lengths are in bytes."""

    kind: FrameKind
    text_length: int
    key: int
    data_length: int


def pack(kind: FrameKind, key: int, text: str, length: int) -> bytes:
    """The header and the text of a frame with ``length`` bytes of data."""
    encoded = text.encode()[:MAX_TEXT]
    return _HEADER.pack(kind, len(encoded), key, length) + encoded


def unpack(header: bytes | bytearray, max_bytes: int) -> FrameHeader:
    """Read a header.

    Raises:
        ProtocolError: the kind is unknown, or a length is over its limit.
    """
    kind, text, key, length = _HEADER.unpack(header)
    if kind not in FrameKind._value2member_map_ or text > MAX_TEXT or length > max_bytes:
        raise ProtocolError(f"a header says kind {kind}, {text} characters and {length} bytes")
    return FrameHeader(FrameKind(kind), text, key, length)


class FrameHandler(Protocol):
    """Receives the frames that a reader has read."""

    state: GroupState
    matcher: MessageMatcher
    read_lock: threading.Lock
    """Held while data is put into the memory of receives."""

    def handle(self, peer: int, kind: FrameKind, text: str) -> None:
        """A frame without data has arrived."""


class FrameReader:
    """Turns the bytes of one rank into frames. The data of tensors is received straight into its final place.

    ``target()`` is the memory to receive into next. ``filled(n)`` says that n bytes were put there; both are called
    under the handler's ``read_lock``. ``advance()``, without it, does what follows.

    Args:
        handler: who gets the frames.
        peer: the rank that sends.
        max_bytes: the largest data of a frame.
    """

    def __init__(self, handler: FrameHandler, peer: int, max_bytes: int) -> None:
        self._handler, self._peer = handler, peer
        self._max_bytes = max_bytes
        self._begin_frame()

    def _begin_frame(self) -> None:
        self._raw_header = bytearray(HEADER_SIZE)
        self._target = memoryview(self._raw_header)  # what is to be filled next: the header, the text, the data
        self._header: FrameHeader | None = None
        self._message: IncomingMessage | None = None

    def target(self) -> memoryview:
        """The memory to receive into; never empty."""
        return self._target

    def filled(self, count: int) -> None:
        """``count`` bytes were received into the target."""
        self._target = self._target[count:]

    def move(self, message: IncomingMessage) -> None:
        """The receive of the message that arrives now has given up: the message goes on in memory of its own."""
        own = room_for(message.length)
        filled = message.length - len(self._target)
        own[:filled] = message.buffer[:filled]
        message.buffer, self._target = own, own[filled:]

    def advance(self) -> bool:
        """If the target is full, pass on what it was for, and set the next one.

        Returns:
            Whether the rank sends more; False after its last frame.

        Raises:
            ProtocolError: the bytes are not a frame.
            CollectiveError: the rank has sent too many messages that nobody receives.
        """
        while not len(self._target):
            if not self._advance():
                return False
        return True

    def abandon(self, error: Exception) -> None:
        """The connection has ended: fail the receive whose data has arrived in part."""
        if self._message is not None and self._message.recv is not None:
            self._message.recv.finish(error)

    def _advance(self) -> bool:
        """The target is full: set the next one. Returns False after the rank's last frame."""
        if self._message is not None:
            self._handler.matcher.complete(self._message)
            self._begin_frame()
        elif self._header is not None:
            return self._on_text(self._header)
        elif not self._raw_header[0]:
            begun = self._raw_header.lstrip(HEARTBEAT)
            self._raw_header[: len(begun)] = begun
            self._target = memoryview(self._raw_header)[len(begun) :]
        else:
            self._header = unpack(self._raw_header, self._max_bytes)
            self._text = bytearray(self._header.text_length)
            self._target = memoryview(self._text)
        return True

    def _on_text(self, header: FrameHeader) -> bool:
        kind, text = header.kind, self._text.decode(errors="replace")
        if kind in (FrameKind.COLLECTIVE, FrameKind.FINGERPRINT):
            self._handler.state.on_fingerprint(self._peer, header.key, text)
        if kind not in (FrameKind.COLLECTIVE, FrameKind.MESSAGE):
            self._handler.handle(self._peer, kind, text)
            self._begin_frame()
            return kind not in (FrameKind.GOODBYE, FrameKind.PROGRAM_FAILED)
        # In this order: if there is no memory for the data, ``abandon`` has to know of the receive.
        self._message = IncomingMessage(kind, self._peer, header.key, text, header.data_length)
        with self._handler.read_lock:
            self._handler.matcher.begin(self._message)
            self._target = self._message.buffer
        return True
