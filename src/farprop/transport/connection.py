"""One authenticated connection: frames out, frames in.

Rules that hold here:

- Sending never blocks. What the kernel does not take waits in the outbox, and ``on_blocked`` asks for a call of
  ``flush`` when the socket is writable.
- Reading is done by one thread at a time; the caller sees to that.
- Decisions are made under the lock; a connection is closed once, and sending on a closed one is
  ``ConnectionLostError``.
"""

from __future__ import annotations

import array
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from farprop.errors import ConnectionLostError, ProtocolError, UsageError
from farprop.transport.segments import MIN_SHARED, Borrowing, Lending, Segment, SegmentPool
from farprop.wire.codec import Encoded
from farprop.wire.frames import FORGET, MAX_BUFFERS, MAX_GIVES, NOTICE, Frame, FrameReader, pack

_DONTWAIT = socket.MSG_DONTWAIT
_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_SEND_FLAGS = _DONTWAIT | _NOSIGNAL
_MAX_DESCRIPTORS = 200  # the kernel takes 253 in one message
_ANCILLARY = socket.CMSG_SPACE(_MAX_DESCRIPTORS * 4)
_MAX_PARTS = 512  # below IOV_MAX
_CORK_FRAMES = 32
_CORK_BYTES = 1024
_NOTHING = Encoded(b"", [], None)


class _Unsent:
    """Bytes that wait in the outbox, what keeps them alive, and descriptors that go with the first of them."""

    __slots__ = ("data", "descriptors", "keep")

    def __init__(self, data: memoryview, descriptors: list[Segment], keep: Any) -> None:
        self.data = data
        self.descriptors = descriptors
        self.keep = keep


class Connection:
    """See the module's rules. ``shared`` says that segments can be passed on it."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        shared: bool,
        pool: SegmentPool,
        max_bytes: int,
        on_blocked: Callable[[Connection], None],
        on_returned: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.fd = sock.fileno()
        self.closed = False
        self.outbox_bytes = 0
        self.lending = Lending(pool)
        self.borrowing = Borrowing(on_returned)
        self._sock = sock
        self._shared = shared
        self._max_bytes = max_bytes
        self._on_blocked = on_blocked
        self._reader = FrameReader(max_bytes)
        self._lock = threading.Lock()
        self._outbox: deque[_Unsent] = deque()
        self._corked: list[bytes] = []

    # Sending

    def send(
        self,
        kind: int,
        flags: int,
        call_id: int,
        seconds: float,
        name: bytes,
        encoded: Encoded = _NOTHING,
        more: bool = False,
    ) -> None:
        """Send a frame. With ``more`` a small one may wait for others, or for ``uncork``: one system call for many."""
        if not encoded.buffers:
            if len(encoded.meta) > self._max_bytes:
                raise self._too_large(len(encoded.meta))
            gives = self.borrowing.take_returned(MAX_GIVES) if self.borrowing.returned else ()
            data = pack(kind, flags | encoded.flags, call_id, seconds, name, encoded.meta, (), gives)
            if more and len(data) < _CORK_BYTES and len(self._corked) < _CORK_FRAMES:
                with self._lock:
                    self._corked.append(data)
                return
            self._transmit([data], [], None)
            return
        parts: list[Any] = [b""]
        fresh: list[Segment] = []
        table = []
        total = len(encoded.meta)
        if len(encoded.buffers) > MAX_BUFFERS:
            raise UsageError(f"A message can hold at most {MAX_BUFFERS} large buffers; send them in parts.")
        for buffer in encoded.buffers:
            total += buffer.nbytes
            if total > self._max_bytes:
                raise self._too_large(total)
        for buffer in encoded.buffers:
            segment = None
            if self._shared and buffer.nbytes >= MIN_SHARED and len(fresh) < _MAX_DESCRIPTORS:
                segment = self.lending.lend(buffer)
            if segment is None:
                table.append((buffer.nbytes, 0))
                parts.append(buffer.cast("B") if buffer.format != "B" else buffer)
            else:
                table.append((buffer.nbytes, segment.number))
                if segment.fd >= 0:
                    fresh.append(segment)
        gives = self.borrowing.take_returned(MAX_GIVES) if self.borrowing.returned else ()
        parts[0] = pack(kind, flags | encoded.flags, call_id, seconds, name, encoded.meta, table, gives)
        self._transmit(parts, fresh, encoded.keep)
        if self.lending.dropped:
            self._send_forgets()

    def uncork(self) -> None:
        """Send what waits for more."""
        if self._corked:
            self._transmit([], [], None)

    def give_back(self) -> None:
        """Send the give-backs that have found no frame to ride on."""
        while self.borrowing.returned:
            self._transmit([pack(NOTICE, 0, 0, 0.0, b"", b"", (), self.borrowing.take_returned(MAX_GIVES))], [], None)

    def _send_forgets(self) -> None:
        numbers: list[int] = []
        while len(numbers) < MAX_GIVES:
            try:
                numbers.append(self.lending.dropped.popleft())
            except IndexError:
                break  # another thread sends them
        if numbers:
            self._transmit([pack(NOTICE, FORGET, 0, 0.0, b"", b"", (), numbers)], [], None)

    def _too_large(self, size: int) -> UsageError:
        return UsageError(
            f"A message of {size} bytes is larger than FARPROP_MAX_MESSAGE_BYTES={self._max_bytes}. Send it in parts, "
            "or raise the limit on every worker."
        )

    def _transmit(self, parts: list[Any], fresh: list[Segment], keep: Any) -> None:
        blocked = False
        with self._lock:
            if self.closed:
                raise ConnectionLostError(f"The connection to {self.peer} is closed.")
            if self._corked:
                corked, self._corked = b"".join(self._corked), []
                parts = [corked, *parts]
            if not parts:
                return
            if self._outbox:
                self._queue(parts, 0, fresh, keep)
                return
            try:
                sent = self._write(parts, fresh)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectionLostError(f"The connection to {self.peer} broke: {error}") from error
            if sent:
                # Descriptors go with the first byte that is sent, of whatever frame: they keep their order.
                for segment in fresh:
                    segment.passed()
                fresh = []
            if sent < sum(map(len, parts)):
                self._queue(parts, sent, fresh, keep)
                blocked = True
        if blocked:
            self._on_blocked(self)

    def _write(self, parts: list[Any], fresh: list[Segment]) -> int:
        if fresh:
            rights = array.array("i", [segment.fd for segment in fresh])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            return self._sock.sendmsg(parts[:_MAX_PARTS], ancillary, _SEND_FLAGS)
        if len(parts) == 1:
            return self._sock.send(parts[0], _SEND_FLAGS)
        return self._sock.sendmsg(parts[:_MAX_PARTS], (), _SEND_FLAGS)

    def _queue(self, parts: list[Any], skip: int, fresh: list[Segment], keep: Any) -> None:
        for part in parts:
            if skip >= len(part):
                skip -= len(part)
                continue
            data = memoryview(part)[skip:]
            skip = 0
            self._outbox.append(_Unsent(data, fresh, (part, keep)))
            fresh = []
            self.outbox_bytes += len(data)

    def flush(self) -> bool:
        """Send what waits, as far as the kernel takes it; True if nothing is left."""
        with self._lock:
            while self._outbox and not self.closed:
                first = self._outbox[0]
                try:
                    sent = self._write([first.data], first.descriptors)
                except BlockingIOError:
                    return False
                except OSError as error:
                    raise ConnectionLostError(f"The connection to {self.peer} broke: {error}") from error
                for segment in first.descriptors:
                    segment.passed()
                first.descriptors = []
                self.outbox_bytes -= sent
                if sent < len(first.data):
                    first.data = first.data[sent:]
                else:
                    self._outbox.popleft()
            return True

    # Receiving

    def receive(self) -> list[Frame] | None:
        """Frames that are here; None at the end of the stream. Raises BlockingIOError when there is nothing.

        Raises ``ProtocolError`` for what makes no sense.
        """
        reader = self._reader
        try:
            if self._shared:
                count, ancillary, flags, _ = self._sock.recvmsg_into([reader.target()], _ANCILLARY, _DONTWAIT)
                if ancillary:
                    self._take_descriptors(ancillary)
                if flags & socket.MSG_CTRUNC:
                    raise ProtocolError("descriptors were lost: has this process too many open files?")
            else:
                count = self._sock.recv_into(reader.target(), 0, _DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:
            return None
        if not count:
            return None
        frames = reader.received(count)
        for frame in frames:
            if frame.buffers:
                # Now and not later: descriptors are matched to segments by their order in the stream.
                frame.buffers = [b if type(b) is bytearray else self.borrowing.borrow(*b) for b in frame.buffers]
            if frame.gives:
                if frame.flags & FORGET:
                    self.borrowing.forget(frame.gives)
                else:
                    self.lending.give_back(frame.gives)
                    if self.lending.dropped:
                        self._send_forgets()
        return frames

    def _take_descriptors(self, ancillary: Any) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                for descriptor in descriptors:
                    os.set_inheritable(descriptor, False)
                self.borrowing.arrive(descriptors)

    # Ending

    def close(self) -> bool:
        """Close once; True for the caller that did it."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            for unsent in self._outbox:
                for segment in unsent.descriptors:
                    segment.passed()
            self._outbox.clear()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # a thread that waits in recv wakes up
        except OSError:
            pass
        self._sock.close()
        self.lending.close()
        self.borrowing.close()
        return True

    def abandon(self) -> None:
        """In a forked child: close the descriptor without a word to the peer."""
        self.closed = True
        self.borrowing.close()
        self._sock.close()
