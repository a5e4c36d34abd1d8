"""One authenticated connection, which sends and receives messages.

Rules that hold here:

- Sending never blocks. Bytes that the kernel does not take wait in the outbox, and ``on_blocked`` asks the owner to
  call ``flush`` when the socket is writable.
- One thread reads at a time; the owner ensures it.
- State changes under the lock. A connection is closed once, and sending on a closed one raises
  ``ConnectionLostError``.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from farprop.errors import ConnectionLostError, ProtocolError, UsageError
from farprop.locks import make_lock
from farprop.protocol.host_liveness import HostLiveness, HostState
from farprop.protocol.served_calls import ServedCalls
from farprop.transport.shared_copies import BorrowedCopy, SharedCopy
from farprop.transport.shared_memory import (
    MIN_SHARED,
    FdChannel,
    SegmentPool,
    ShmReceiver,
    ShmSender,
    receive_with_descriptor,
    rights,
)
from farprop.transport.sockets import SEND_FLAGS, can_probe, seconds_since_data, tcp_facts, unsent
from farprop.transport.tls import Stream, TlsSocket
from farprop.wire.frames import FrameReader
from farprop.wire.message import (
    FORGET,
    HEADS,
    MAX_BUFFERS,
    MAX_RETURNED,
    NOTICE,
    SHARED,
    Message,
    ParcelPart,
    notice,
)

_DONTWAIT = socket.MSG_DONTWAIT
_MAX_PARTS = 512  # below IOV_MAX
_CORK_FRAMES = 32
_CORK_BYTES = 1024


class _Unsent:
    """Bytes in the outbox, and the object that keeps their memory alive."""

    __slots__ = ("data", "keep")

    def __init__(self, data: memoryview, keep: Any) -> None:
        self.data = data
        self.keep = keep


class Connection:
    """See the module's rules. On a Unix connection, segments can be passed once both sides have its descriptor channel:
    the dialer makes it with ``open_fd_channel``, and the listener receives it with the first message.

    Args:
        sock: the connected and authenticated socket.
        peer: the name of the worker at the other end.
        rank: its rank.
        pool: the free segments of this process.
        max_bytes: the largest message that this worker accepts.
        peer_max_bytes: the largest message that the peer accepts.
        on_blocked: called when the outbox is no longer empty.
        on_returned: called when many bytes of segments were released here and no message has returned them yet.
        shares_memory: whether large buffers may travel in shared memory.
    """

    def __init__(
        self,
        sock: Stream,
        peer: str,
        rank: int,
        pool: SegmentPool,
        max_bytes: int,
        peer_max_bytes: int,
        on_blocked: Callable[[Connection], None],
        on_returned: Callable[[], None],
        shares_memory: bool = True,
    ) -> None:
        self.peer = peer
        self.rank = rank
        self.fd = sock.fileno()
        self.closed = False
        self.outbox_bytes = 0  # bytes in the outbox, and bytes that TLS has encrypted and not sent
        self._queued_bytes = 0
        self.sender = ShmSender(pool)
        self.receiver = ShmReceiver(on_returned)
        self._sock = sock
        self._tls = sock if isinstance(sock, TlsSocket) else None
        is_unix = self.shares_clock = sock.family == socket.AF_UNIX  # then requests carry a time of the clock
        self.served: ServedCalls[Callable[[], object]] = ServedCalls()  # the peer's requests, for the server
        self.last_input = 0.0  # when the bytes that were read last had arrived, as far as the server knows
        # The socket of a Unix connection whose descriptor channel is not there yet.
        self._unpaired = sock if shares_memory and is_unix and isinstance(sock, socket.socket) else None
        self._fd_channel: FdChannel | None = None
        self._max_bytes = min(max_bytes, peer_max_bytes)
        self._max_is_ours = max_bytes <= peer_max_bytes
        self._on_blocked = on_blocked
        self._reader = FrameReader(max_bytes)
        self._lock = make_lock("connection")
        self._outbox: deque[_Unsent] = deque()
        self._corked: list[bytes] = []
        self._liveness = HostLiveness()

    def open_fd_channel(self) -> None:
        """On the dialer's side, make the descriptor channel if the connection can have one. Call this first."""
        if self._unpaired is not None:
            channel, theirs = FdChannel.pair()
            try:
                with theirs:
                    self._unpaired.sendmsg([notice()], rights(theirs.fileno()), SEND_FLAGS)
            except BaseException:
                channel.close()
                raise
            self._take_fd_channel(channel)

    def _take_fd_channel(self, channel: FdChannel) -> None:
        self._fd_channel = self.receiver.fd_channel = self.sender.fd_channel = channel
        self._unpaired = None

    # Sending

    def send(self, message: Message, more: bool = False) -> None:
        """Send a message. With ``more`` a small one may wait for others, or for ``uncork``: one system call for many.

        Raises:
            ConnectionLostError: the connection is closed or breaks.
            UsageError: the message is too large. Nothing was sent.
        """
        buffers = message.buffers
        if not buffers:
            if len(message.payload) > self._max_bytes:
                raise self._too_large(len(message.payload))
            data = message.pack((), self.receiver.take_returned(MAX_RETURNED) if self.receiver.returned else ())
            message.sent = True
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
        if len(buffers) > MAX_BUFFERS:
            raise UsageError(f"A message can hold at most {MAX_BUFFERS} large buffers; send them in parts.")
        if (total := message.nbytes) > self._max_bytes:
            raise self._too_large(total)
        for buffer in buffers:
            segment = None
            if type(buffer) is ParcelPart:
                table.append(buffer.row)
                continue
            if type(buffer) is SharedCopy:
                number = self.sender.lend_copy(buffer)
                if number is not None:
                    table.append((buffer.nbytes, SHARED | number))
                    continue
                buffer.lose()  # its bytes wait in the outbox, perhaps for long
                buffer = buffer.view
            if self._fd_channel is not None and buffer.nbytes >= MIN_SHARED:
                segment = self.sender.lend(buffer)
            if segment is None:
                table.append((buffer.nbytes, 0))
                parts.append(buffer.cast("B") if buffer.format != "B" else buffer)
            else:
                table.append((buffer.nbytes, segment.number))
        parts[0] = message.pack(table, self.receiver.take_returned(MAX_RETURNED) if self.receiver.returned else ())
        message.sent = True
        self._transmit(parts, message.keep)
        if self.sender.dropped:
            self._send_forgets()

    @property
    def has_corked(self) -> bool:
        """Whether messages wait for more."""
        return bool(self._corked)

    def uncork(self) -> None:
        """Send the messages that wait for more."""
        if self._corked:
            self._transmit([], None)

    def give_back(self) -> None:
        """Return segments that no message has returned yet, and have the peer forget those that were dropped."""
        while self.receiver.returned:
            self._transmit([notice(self.receiver.take_returned(MAX_RETURNED))], None)
        if self.sender.dropped:
            self._send_forgets()

    def _send_forgets(self) -> None:
        numbers: list[int] = []
        while len(numbers) < MAX_RETURNED:
            try:
                numbers.append(self.sender.dropped.popleft())
            except IndexError:
                break  # another thread is sending them
        if numbers:
            self._transmit([notice(numbers, FORGET)], None)

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
                sent = self._sock.send(parts[0], SEND_FLAGS) if len(parts) == 1 else self._write(parts)
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
        return self._sock.sendmsg(parts[:_MAX_PARTS], (), SEND_FLAGS)

    def _queue(self, parts: list[Any], skip: int, keep: Any) -> None:
        for data in unsent(parts, skip):
            self._outbox.append(_Unsent(data, keep))
            self._queued_bytes += len(data)
        self._count_unsent()

    def _count_unsent(self) -> None:
        self.outbox_bytes = self._queued_bytes + (0 if self._tls is None else len(self._tls.unsent))

    def flush(self) -> bool:
        """Send from the outbox as much as the kernel takes; returns True if nothing is left."""
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
                return self.closed or self._tls is None or not self._tls.unsent or self._tls.flush(SEND_FLAGS)
            except BlockingIOError:
                return False
            except OSError as error:
                raise ConnectionLostError(f"The connection to {self.peer} broke: {error}") from error
            finally:
                self._count_unsent()

    # Receiving

    def receive(self) -> list[Message] | None:
        """Read what the socket has.

        Returns:
            The messages that are complete; None at the end of the stream.

        Raises:
            BlockingIOError: there is nothing to read.
            ProtocolError: the peer sent malformed bytes.
        """
        reader = self._reader
        try:
            if self._unpaired is not None:
                count = self._receive_fd_channel(self._unpaired)
            else:
                count = self._sock.recv_into(reader.target, 0, _DONTWAIT)
        except BlockingIOError:
            raise
        except OSError:
            return None
        if not count:
            return None
        messages = reader.received(count)
        if self._tls is not None:
            while self._tls.has_more and (count := self._decrypt_more()):
                messages += reader.received(count)
        for message in messages:
            if message.flags & HEADS:
                message.parse_heads()
            if message.buffers:
                message.buffers = [b if type(b) is memoryview else self._borrow(*b) for b in message.buffers]
            if message.returned_segments:
                if message.kind == NOTICE and message.flags & FORGET:
                    self.receiver.forget(message.returned_segments)
                else:
                    self.sender.take_back(message.returned_segments)
                    if self.sender.dropped:
                        self._send_forgets()
        return messages

    def _borrow(self, segment: int, length: int) -> Any:
        """What a row of the table of buffers stands for, if the bytes are not inline."""
        if segment < SHARED:
            return self.receiver.borrow(segment, length)
        part = ParcelPart.of(segment, length)
        if part is not None:
            return part
        number = segment ^ SHARED
        descriptor = self.receiver.receive_descriptor(number)
        return BorrowedCopy(descriptor, length, partial(self.receiver.give_back, number, length))

    def input_age(self) -> float:
        """For a TCP connection: how many seconds the bytes that were just read have waited in the kernel, at least."""
        return seconds_since_data(self._sock)

    def _decrypt_more(self) -> int:
        """Decrypt bytes that TLS has read already: they don't make the socket readable again."""
        try:
            return int(self._sock.recv_into(self._reader.target, 0, _DONTWAIT))
        except BlockingIOError:
            return 0

    def _receive_fd_channel(self, sock: socket.socket) -> int:
        """Read the dialer's first message, which passes the descriptor channel."""
        count, descriptor = receive_with_descriptor(sock, self._reader.target)
        if descriptor is not None:
            self._take_fd_channel(FdChannel.from_descriptor(descriptor))
        elif count:
            raise ProtocolError("the first message on a Unix connection passes no descriptor channel")
        return count

    # The other host

    @property
    def can_probe(self) -> bool:
        """Whether ``probe`` tells anything: connections within a host need no probes."""
        return can_probe(self._sock)

    def probe(self) -> HostState:
        """Ask the kernel whether the other host still answers. If there is nothing to answer, send something.

        Raises:
            ConnectionLostError: the connection is closed or breaks.
        """
        try:
            state = self._liveness.on_probe(tcp_facts(self._sock))
        except OSError as error:
            raise ConnectionLostError(f"The connection to {self.peer} broke: {error}") from error
        if state is HostState.IDLE and not self.outbox_bytes:
            self._transmit([notice()], None)
        return state

    # Ending

    def hang_up(self) -> None:
        """Shut the socket down, as a broken network would: both ends read the end of the stream."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def close(self) -> bool:
        """Close the connection; returns True for the one call that closes it."""
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
        self.sender.close()
        self.receiver.close()
        if self._fd_channel is not None:
            self._fd_channel.close()
        return True

    def abandon(self) -> None:
        """In a forked child, close the descriptor without sending anything to the peer."""
        self.closed = True
        self.receiver.close()
        self._sock.close()
        if self._fd_channel is not None:
            self._fd_channel.close()
