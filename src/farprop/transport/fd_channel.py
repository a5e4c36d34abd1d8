"""A second socket beside a Unix connection, which passes the file descriptors of segments.

The connection itself could pass them, but then every read would have to ask for them, which makes a small call a fifth
slower. The dialer makes a pair of sockets and passes one end with the connection's first message.
"""

from __future__ import annotations

import array
import os
import socket
import struct

from farprop.errors import ProtocolError
from farprop.transport.sockets import SEND_FLAGS

_ONE_DESCRIPTOR = socket.CMSG_SPACE(4)
_NUMBER = struct.Struct("<Q")


def rights(descriptor: int) -> list[tuple[int, int, array.array[int]]]:
    """The ancillary data that passes a descriptor."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


def receive_with_descriptor(sock: socket.socket, target: memoryview) -> tuple[int, int]:
    """Read into ``target``; returns the number of bytes, and the descriptor passed with them (-1: none)."""
    count, ancillary, flags, _ = sock.recvmsg_into([target], _ONE_DESCRIPTOR, SEND_FLAGS)
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    if len(received) > 1 or flags & socket.MSG_CTRUNC:
        for descriptor in received:
            os.close(descriptor)
        raise ProtocolError("descriptors were lost: does this process have too many open files?")
    if not received:
        return count, -1
    os.set_inheritable(received[0], False)
    return count, received[0]


class FdChannel:
    """One end of a channel. Both ends send and receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._early: dict[int, int] = {}  # descriptors that were received before they were asked for

    @classmethod
    def pair(cls) -> tuple[FdChannel, socket.socket]:
        """Make a channel; returns our end, and the socket to pass to the peer."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    @classmethod
    def from_descriptor(cls, descriptor: int) -> FdChannel:
        try:
            return cls(socket.socket(fileno=descriptor))
        except OSError as error:
            os.close(descriptor)
            raise ProtocolError(f"the peer passed something that is no socket: {error}") from error

    def send(self, number: int, descriptor: int) -> bool:
        """Pass a segment's descriptor. Call this before the message that needs it; False if the socket is full."""
        try:
            return self._sock.sendmsg([_NUMBER.pack(number)], rights(descriptor), SEND_FLAGS) == _NUMBER.size
        except OSError:
            return False

    def receive(self, number: int) -> int:
        """Return the descriptor of a segment, which the caller owns. The peer sent it before it sent the number."""
        while number not in self._early:
            message = bytearray(_NUMBER.size)
            try:
                count, descriptor = receive_with_descriptor(self._sock, memoryview(message))
            except OSError as error:
                raise ProtocolError(f"segment {number} was never passed: {error}") from error
            (arrived,) = _NUMBER.unpack(message)
            if descriptor < 0 or arrived in self._early:
                if descriptor >= 0:
                    os.close(descriptor)
                raise ProtocolError(f"segment {number} was never passed ({count} bytes without a descriptor)")
            self._early[arrived] = descriptor
        return self._early.pop(number)

    def close(self) -> None:
        self._sock.close()
        while self._early:
            os.close(self._early.popitem()[1])
