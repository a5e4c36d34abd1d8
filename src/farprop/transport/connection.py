"""One authenticated connection: frames out, frames in.

Rules that hold here:

- Sending never blocks. What the kernel does not take waits in the outbox, and ``on_blocked`` asks for a call of
  ``flush`` when the socket is writable.
- Reading is done by one thread at a time; the caller sees to that.
- Decisions are made under the lock; a connection is closed once, and sending on a closed one is
  ``ConnectionLostError``.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from farprop.errors import ConnectionLostError, ProtocolError, UsageError
from farprop.transport.passage import Passage, receive_with_descriptor, rights
from farprop.transport.segments import MIN_SHARED, Borrowing, Lending, SegmentPool
from farprop.transport.tls import Stream, TlsSocket
from farprop.wire.codec import Encoded
from farprop.wire.frames import FORGET, MAX_BUFFERS, MAX_GIVES, NOTICE, Frame, FrameReader, pack

_DONTWAIT = socket.MSG_DONTWAIT
_NOSIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_SEND_FLAGS = _DONTWAIT | _NOSIGNAL
_MAX_PARTS = 512  # below IOV_MAX
_CORK_FRAMES = 32
_CORK_BYTES = 1024
_NOTHING = Encoded(b"", [], None)


class _Unsent:
    """Bytes that wait in the outbox, and what keeps them alive."""

    __slots__ = ("data", "keep")

    def __init__(self, data: memoryview, keep: Any) -> None:
        self.data = data
        self.keep = keep


class Connection:
    """See the module's rules. Segments can be passed on a Unix connection once both sides have its passage: the dialler
    makes it with ``open_passage``, the other side gets it with the first message.
    """

    def __init__(
        self,
        sock: Stream,
        peer: str,
        pool: SegmentPool,
        max_bytes: int,
        peer_max_bytes: int,
        on_blocked: Callable[[Connection], None],
        on_returned: Callable[[], None],
        shares_memory: bool = True,
    ) -> None:
        self.peer = peer
        self.rank = -1  # the peer's, where it dialled us
        self.fd = sock.fileno()
        self.closed = False
        self.outbox_bytes = 0  # of the outbox, and what TLS has encrypted and not sent
        self._queued_bytes = 0
        self.lending = Lending(pool)
        self.borrowing = Borrowing(on_returned)
        self._sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        self._awaits_passage = shares_memory and sock.family == socket.AF_UNIX
        self._passage: Passage | None = None
        self._max_bytes = min(max_bytes, peer_max_bytes)
        self._max_is_ours = max_bytes <= peer_max_bytes
        self._on_blocked = on_blocked
        self._reader = FrameReader(max_bytes)
        self._lock = threading.Lock()
        self._outbox: deque[_Unsent] = deque()
        self._corked: list[bytes] = []

    def open_passage(self) -> None:
        """The dialler, before anything else: make the passage, on a connection that can have one."""
        if self._awaits_passage:
            passage, theirs = Passage.pair()
            try:
                with theirs:
                    self._sock.sendmsg([pack(NOTICE, 0, 0, 0.0, b"", b"")], rights(theirs.fileno()), _SEND_FLAGS)
            except BaseException:
                passage.close()
                raise
            self._take_passage(passage)

    def _take_passage(self, passage: Passage) -> None:
        self._passage = self.borrowing.passage = self.lending.passage = passage
        self._awaits_passage = False

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
                    if self.closed:
                        raise ConnectionLostError(f"The connection to {self.peer} is closed.")
                    self._corked.append(data)
                return
            self._transmit([data], None)
            return
        parts: list[Any] = [b""]
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
            if self._passage is not None and buffer.nbytes >= MIN_SHARED:
                segment = self.lending.lend(buffer)
            if segment is None:
                table.append((buffer.nbytes, 0))
                parts.append(buffer.cast("B") if buffer.format != "B" else buffer)
            else:
                table.append((buffer.nbytes, segment.number))
        gives = self.borrowing.take_returned(MAX_GIVES) if self.borrowing.returned else ()
        parts[0] = pack(kind, flags | encoded.flags, call_id, seconds, name, encoded.meta, table, gives)
        self._transmit(parts, encoded.keep)
        if self.lending.dropped:
            self._send_forgets()

    def uncork(self) -> None:
        """Send what waits for more."""
        if self._corked:
            self._transmit([], None)

    def give_back(self) -> None:
        """Send the give-backs that have found no frame to ride on."""
        while self.borrowing.returned:
            self._transmit([pack(NOTICE, 0, 0, 0.0, b"", b"", (), self.borrowing.take_returned(MAX_GIVES))], None)

    def _send_forgets(self) -> None:
        numbers: list[int] = []
        while len(numbers) < MAX_GIVES:
            try:
                numbers.append(self.lending.dropped.popleft())
            except IndexError:
                break  # another thread sends them
        if numbers:
            self._transmit([pack(NOTICE, FORGET, 0, 0.0, b"", b"", (), numbers)], None)

    def _too_large(self, size: int) -> UsageError:
        whose = "of this worker" if self._max_is_ours else f"of {self.peer}, which does not take it"
        return UsageError(
            f"A message of {size} bytes to {self.peer} is larger than FARPROP_MAX_MESSAGE_BYTES={self._max_bytes} "
            f"{whose}. Send it in parts, or raise the limit on every worker."
        )

    def _transmit(self, parts: list[Any], keep: Any) -> None:
        blocked = False
        with self._lock:
            if self.closed:
                raise ConnectionLostError(f"The connection to {self.peer} is closed.")
            if self._corked:
                corked, self._corked = b"".join(self._corked), []
                parts = [corked, *parts]
            if not parts:
                return
            if self.outbox_bytes:
                self._queue(parts, 0, keep)
                return
            try:
                sent = self._write(parts)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                raise ConnectionLostError(f"The connection to {self.peer} broke: {error}") from error
            if sent < sum(map(len, parts)):
                self._queue(parts, sent, keep)
                blocked = True
            elif self._tls is not None and self._tls.unsent:
                self._count_unsent()
                blocked = True
        if blocked:
            self._on_blocked(self)

    def _write(self, parts: list[Any]) -> int:
        if len(parts) == 1:
            return self._sock.send(parts[0], _SEND_FLAGS)
        return self._sock.sendmsg(parts[:_MAX_PARTS], (), _SEND_FLAGS)

    def _queue(self, parts: list[Any], skip: int, keep: Any) -> None:
        for part in parts:
            if skip >= len(part):
                skip -= len(part)
                continue
            data = memoryview(part)[skip:]
            skip = 0
            self._outbox.append(_Unsent(data, (part, keep)))
            self._queued_bytes += len(data)
        self._count_unsent()

    def _count_unsent(self) -> None:
        self.outbox_bytes = self._queued_bytes + (0 if self._tls is None else len(self._tls.unsent))

    def flush(self) -> bool:
        """Send what waits, as far as the kernel takes it; True if nothing is left."""
        with self._lock:
            try:
                while self._outbox and not self.closed:
                    first = self._outbox[0]
                    sent = self._write([first.data])
                    self._queued_bytes -= sent
                    if sent < len(first.data):
                        first.data = first.data[sent:]
                    else:
                        self._outbox.popleft()
                return self.closed or self._tls is None or not self._tls.unsent or self._tls.flush(_SEND_FLAGS)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionLostError(f"The connection to {self.peer} broke: {error}") from error
            finally:
                self._count_unsent()

    # Receiving

    def receive(self) -> list[Frame] | None:
        """Frames that are here; None at the end of the stream. Raises BlockingIOError when there is nothing.

        Raises ``ProtocolError`` for what makes no sense.
        """
        reader = self._reader
        try:
            if self._awaits_passage:
                count = self._receive_passage()
            else:
                count = self._sock.recv_into(reader.target(), 0, _DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:
            return None
        if not count:
            return None
        frames = reader.received(count)
        if self._tls is not None:
            while self._tls.has_more and (count := self._decrypt_more()):
                frames += reader.received(count)
        for frame in frames:
            if frame.buffers:
                frame.buffers = [b if type(b) is memoryview else self.borrowing.borrow(*b) for b in frame.buffers]
            if frame.gives:
                if frame.flags & FORGET:
                    self.borrowing.forget(frame.gives)
                else:
                    self.lending.give_back(frame.gives)
                    if self.lending.dropped:
                        self._send_forgets()
        return frames

    def _decrypt_more(self) -> int:
        """What has come already does not make the socket ready again."""
        try:
            return int(self._sock.recv_into(self._reader.target(), 0, _DONTWAIT))
        except BlockingIOError:
            return 0

    def _receive_passage(self) -> int:
        """Read the dialler's first message, which has the passage with it."""
        assert isinstance(self._sock, socket.socket)
        count, descriptor = receive_with_descriptor(self._sock, self._reader.target())
        if descriptor >= 0:
            self._take_passage(Passage.from_descriptor(descriptor))
        elif count:
            raise ProtocolError("the first message on a Unix connection has no passage for segments")
        return count

    # Ending

    def hang_up(self) -> None:
        """Break the connection, as a cut wire would: both ends find out by themselves."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> bool:
        """Close once; True for the caller that did it."""
        with self._lock:
            if self.closed:
                return False
            self.closed = True
            self._outbox.clear()
        try:
            self._sock.shutdown(socket.SHUT_RDWR)  # a thread that waits in recv wakes up
        except OSError:
            pass
        self._sock.close()
        self.lending.close()
        self.borrowing.close()
        if self._passage is not None:
            self._passage.close()
        return True

    def abandon(self) -> None:
        """In a forked child: close the descriptor without a word to the peer."""
        self.closed = True
        self.borrowing.close()
        self._sock.close()
        if self._passage is not None:
            self._passage.close()
