"""Listening sockets, and accepted connections whose peers have not proved yet who they are."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

from farprop.errors import AuthenticationError, ConnectionLostError, FarpropError, ProtocolError
from farprop.protocol.handshake import HELLO, PROVEN, READY, ListenerHandshake
from farprop.protocol.roster import Identity
from farprop.runtime.event_loop import IN, EventLoop
from farprop.runtime.rate_limited_log import RateLimitedLog
from farprop.runtime.timers import TimerHandle
from farprop.transport.tls import Stream, TlsSocket

_log = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 20.0
_MAX_PENDING = 256
_MAX_ACCEPTS = 32  # per event: a flood of connections must not block the loop
_PAUSE_SECONDS = 0.1  # pause between accepts when the process is out of descriptors
_READ_BYTES = 4096
_MAX_RECEIVED_BYTES = 64 << 10  # during a handshake; a user's own chain of certificates takes some of it
_now = time.monotonic


class PendingHandshake:
    """An accepted connection during the handshake. It uses little memory, and has a deadline."""

    def __init__(
        self, acceptor: Acceptor, sock: socket.socket, address: str, machine: ListenerHandshake, tls: TlsSocket | None
    ) -> None:
        self.timer: TimerHandle | None = None  # refuses it at the deadline
        self.sock = sock
        self.peer: Identity | None = None
        self._acceptor = acceptor
        self._machine = machine
        self._tls = tls
        self._is_encrypted = False  # True after the TLS handshake
        self._received = 0
        self.address = address  # "" of a Unix socket

    @property
    def has_begun(self) -> bool:
        """Whether the peer has sent a valid part of the handshake."""
        return self._is_encrypted or (self._tls is None and self._machine.state != HELLO)

    @property
    def stream(self) -> Stream:
        return self._tls or self.sock

    def on_events(self, _: int) -> None:
        try:
            self._check_size()
            while True:
                data = self._receive()
                if data:
                    self._on_data(data)
                if self._tls is None or not self._tls.has_more:
                    break
        except BlockingIOError:
            pass
        except (FarpropError, OSError) as error:
            if self._received:
                self._acceptor.refuse(self, str(error))
            else:
                self._acceptor.let_go(self)  # whoever only looks whether the port is open, such as a readiness probe
            return
        if self.peer is not None:
            if self._tls is not None:
                self._tls.know_peer()
            self._acceptor.admit(self, self.peer)

    def _check_size(self) -> None:
        if self._received + (0 if self._tls is None else self._tls.received_bytes) > _MAX_RECEIVED_BYTES:
            raise ProtocolError("it sent too much before it proved itself")

    def _receive(self) -> bytes:
        """Return the decrypted bytes from the peer; empty if they only belonged to the TLS handshake."""
        if self._tls is not None and self._is_encrypted:
            data = self._tls.recv(_READ_BYTES)
        else:
            data = self.sock.recv(_READ_BYTES)
            self._received += len(data)
        if not data:
            raise ConnectionLostError("it went away")
        if self._tls is not None and not self._is_encrypted:
            try:
                self._is_encrypted, to_send = self._tls.handshake(data)
            except ProtocolError as error:
                self.sock.send(self._tls.last_words(), socket.MSG_NOSIGNAL)
                raise ProtocolError(f"{error}; is FARPROP_TLS the same on all workers?") from error
            if to_send:
                self.sock.send(to_send, socket.MSG_NOSIGNAL)
            return self._tls.recv(_READ_BYTES) if self._is_encrypted and self._tls.has_more else b""
        return data

    def _on_data(self, data: bytes) -> None:
        reply = self._machine.receive(data)
        if self._machine.state == PROVEN:
            try:
                peer = self._acceptor.check(self._machine.peer_identity)
            except FarpropError as error:
                # It knows the secret, so it may learn the reason.
                self.stream.send(self._machine.refuse(str(error)), socket.MSG_NOSIGNAL)
                raise
            reply = self._machine.welcome()
            if self._machine.state != READY:
                self.stream.send(reply, socket.MSG_NOSIGNAL)
                raise AuthenticationError(f"{peer.name} expects another worker at this address")
            self.peer = peer
        if reply:
            self.stream.send(reply, socket.MSG_NOSIGNAL)


class Acceptor:
    """Accepts connections and makes their peers prove themselves, within a deadline.

    Args:
        loop: watches the sockets, and calls the acceptor.
        worker: this worker's name, for log lines.
        accepted: returns the handshake for a new connection, and its TLS if it has any.
        check: called with the identity of an authenticated peer; returns it parsed, or raises ``FarpropError`` to
            refuse the peer.
        on_proven: called with each authenticated connection.
    """

    def __init__(
        self,
        loop: EventLoop,
        worker: str,
        accepted: Callable[[socket.socket], tuple[ListenerHandshake, TlsSocket | None]],
        check: Callable[[bytes], Identity],
        on_proven: Callable[[Stream, Identity], None],
    ) -> None:
        self._loop = loop
        self._worker = worker
        self._accepted = accepted
        self.check = check
        self._on_proven = on_proven
        self._listeners: list[socket.socket] = []
        self._pending: dict[int, PendingHandshake] = {}
        self._refusals = RateLimitedLog(_log)
        self._closed = False

    def listen(self, listener: socket.socket) -> None:
        """Start to accept connections on this socket."""
        self._listeners.append(listener)
        self._loop.add(listener.fileno(), IN, lambda _: self._on_accept(listener))

    def _on_accept(self, listener: socket.socket) -> None:
        for _ in range(_MAX_ACCEPTS):
            try:
                sock, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if self._closed:
                    return
                # Most likely out of descriptors. The listener stays readable, so ignore it for a moment.
                _log.error("%s can't accept connections: %s", self._worker, error)
                self._loop.change(listener.fileno(), 0)
                self._loop.call_at(_now() + _PAUSE_SECONDS, partial(self._listen_again, listener))
                return
            if len(self._pending) >= _MAX_PENDING:
                self.refuse(self._least_promising(), "too many peers have not proved themselves")
            sock.setblocking(False)
            try:
                host = address[0] if sock.family != socket.AF_UNIX else ""
                pending = PendingHandshake(self, sock, host, *self._accepted(sock))
            except Exception as error:  # the other connections must still be accepted
                self._refusals.warning("refused a connection to %s: %s", self._worker, error)
                sock.close()
                continue
            self._pending[sock.fileno()] = pending
            if self._closed:  # meanwhile, by another thread
                self._close_pending()
                return
            self._loop.add(sock.fileno(), IN, pending.on_events)
            pending.timer = self._loop.call_at(_now() + HANDSHAKE_SECONDS, partial(self._on_deadline, pending))

    def _listen_again(self, listener: socket.socket) -> None:
        self._loop.change(listener.fileno(), IN)

    def _least_promising(self) -> PendingHandshake:
        """The connection to drop when there are too many.

        It is one of those from the address with the most connections: the oldest whose peer has sent nothing valid,
        else the oldest. A worker proves itself within a few round trips, so a flood from another address does not keep
        it out.
        """
        crowd, _ = Counter(pending.address for pending in self._pending.values()).most_common(1)[0]
        candidates = [pending for pending in self._pending.values() if pending.address == crowd]
        return next((pending for pending in candidates if not pending.has_begun), candidates[0])

    def refuse(self, pending: PendingHandshake, why: str) -> None:
        """Close a connection, and log why."""
        self._refusals.warning("refused a connection to %s: %s", self._worker, why)
        self.let_go(pending)

    def let_go(self, pending: PendingHandshake) -> None:
        """Close a connection."""
        self._drop(pending)
        pending.sock.close()

    def admit(self, pending: PendingHandshake, peer: Identity) -> None:
        """The peer is authenticated: pass its connection on."""
        self._drop(pending)
        self._on_proven(pending.stream, peer)

    def _drop(self, pending: PendingHandshake) -> None:
        self._pending.pop(pending.sock.fileno(), None)
        self._loop.remove(pending.sock.fileno())
        if pending.timer is not None:
            pending.timer.cancel()

    def _on_deadline(self, pending: PendingHandshake) -> None:
        if self._pending.get(pending.sock.fileno()) is pending:
            self.refuse(pending, f"it did not prove itself within {HANDSHAKE_SECONDS:.0f} s")

    def close(self) -> None:
        """Close the listening sockets, and the connections during their handshakes."""
        self._closed = True
        for listener in self._listeners:
            self._loop.remove(listener.fileno())
            listener.close()
        self._close_pending()

    def _close_pending(self) -> None:
        for pending in list(self._pending.values()):
            self._drop(pending)
            pending.sock.close()

    def abandon(self) -> None:
        """In a forked child, close the descriptors without sending anything to the peers."""
        for sock in (*self._listeners, *(u.sock for u in self._pending.values())):
            sock.close()
