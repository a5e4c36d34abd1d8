"""Where other workers come in: listening sockets, and connections whose peers have not proved themselves yet."""

from __future__ import annotations

import logging
import socket
import time
from collections import Counter
from collections.abc import Callable

from farprop.errors import AuthenticationError, ConnectionLostError, FarpropError, ProtocolError
from farprop.protocol.handshake import HELLO, PROVEN, READY, Listener
from farprop.protocol.roster import Identity
from farprop.runtime.loop import IN, Loop
from farprop.runtime.sparing import SparingLog
from farprop.transport.tls import Stream, TlsSocket

_log = logging.getLogger("farprop.serving")

HANDSHAKE_SECONDS = 20.0
_MAX_UNPROVEN_PEERS = 256
_ACCEPTS = 32  # at a time: a flood of connections must not keep the loop from everything else
_DEAF_SECONDS = 0.1
_READ = 4096
_MAX_RECEIVED = 64 << 10  # TLS with a chain of certificates of the user's own takes some of it
_now = time.monotonic


class Unproven:
    """An accepted connection whose peer has not proved itself: it holds little, and has a deadline."""

    def __init__(self, door: Door, sock: socket.socket, machine: Listener, tls: TlsSocket | None) -> None:
        self.deadline = _now() + HANDSHAKE_SECONDS
        self.sock = sock
        self.peer: Identity | None = None
        self._door = door
        self._machine = machine
        self._tls = tls
        self._is_encrypted = False  # when its TLS is made
        self._received = 0
        self.address = sock.getpeername()[0] if sock.family != socket.AF_UNIX else ""

    @property
    def has_begun(self) -> bool:
        """Whether it has said something that makes sense."""
        return self._is_encrypted or (self._tls is None and self._machine.state != HELLO)

    @property
    def stream(self) -> Stream:
        return self._tls or self.sock

    def on_events(self, _: int) -> None:
        try:
            self._check_amount()
            while True:
                data = self._receive()
                if data:
                    self._hear(data)
                if self._tls is None or not self._tls.has_more:
                    break
        except BlockingIOError:
            pass
        except (FarpropError, OSError) as error:
            self._door.refuse(self, str(error))
            return
        if self.peer is not None:
            if self._tls is not None:
                self._tls.know_peer()
            self._door.admit(self, self.peer)

    def _check_amount(self) -> None:
        if self._received + (0 if self._tls is None else self._tls.received_bytes) > _MAX_RECEIVED:
            raise ProtocolError("it sent too much before it proved itself")

    def _receive(self) -> bytes:
        """What the peer says, without TLS's own words; nothing if it was only those."""
        if self._tls is not None and self._is_encrypted:
            data = self._tls.recv(_READ)
        else:
            data = self.sock.recv(_READ)
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
            return self._tls.recv(_READ) if self._is_encrypted and self._tls.has_more else b""
        return data

    def _hear(self, data: bytes) -> None:
        reply = self._machine.receive(data)
        if self._machine.state == PROVEN:
            try:
                peer = self._door.check(self._machine.peer_identity)
            except FarpropError as error:
                # It knows the secret, so it may know why.
                self.stream.send(self._machine.refuse(str(error)), socket.MSG_NOSIGNAL)
                raise
            reply = self._machine.welcome()
            if self._machine.state != READY:
                self.stream.send(reply, socket.MSG_NOSIGNAL)
                raise AuthenticationError(f"{peer.name} looks for somebody else at this address")
            self.peer = peer
        if reply:
            self.stream.send(reply, socket.MSG_NOSIGNAL)


class Door:
    """``accepted`` gives what answers a new connection; ``check(identity)`` says who a peer is that has proved that it
    knows the secret, or raises; ``on_proven`` is called with those it did not refuse.
    """

    def __init__(
        self,
        loop: Loop,
        worker: str,
        accepted: Callable[[socket.socket], tuple[Listener, TlsSocket | None]],
        check: Callable[[bytes], Identity],
        on_proven: Callable[[Stream, Identity], None],
    ) -> None:
        self._loop = loop
        self._worker = worker
        self._accepted = accepted
        self.check = check
        self._on_proven = on_proven
        self._listeners: list[socket.socket] = []
        self._deaf_until = 0.0
        self._unproven: dict[int, Unproven] = {}
        self._refusals = SparingLog(_log)

    def listen(self, listener: socket.socket) -> None:
        self._listeners.append(listener)
        self._loop.add(listener.fileno(), IN, lambda _: self._on_accept(listener))

    def _on_accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS):
            try:
                sock, _address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Out of descriptors, most likely. The listener would be ready again at once, so look away for a moment.
                _log.error("%s can't accept connections: %s", self._worker, error)
                self._loop.change(listener.fileno(), 0)
                self._deaf_until = _now() + _DEAF_SECONDS
                self._loop.set_alarm(self._deaf_until)
                return
            if len(self._unproven) >= _MAX_UNPROVEN_PEERS:
                self.refuse(self._least_promising(), "too many peers have not proved themselves")
            sock.setblocking(False)
            try:
                unproven = Unproven(self, sock, *self._accepted(sock))
            except Exception as error:  # whatever it is, others still want to come in
                self._refusals.warning("refused a connection to %s: %s", self._worker, error)
                sock.close()
                continue
            self._unproven[sock.fileno()] = unproven
            self._loop.add(sock.fileno(), IN, unproven.on_events)
            self._loop.set_alarm(unproven.deadline)

    def _least_promising(self) -> Unproven:
        """Of those from the address that most come from, the oldest that has not even made TLS, or the oldest: a worker
        proves itself within a few round trips, so a flood of others from elsewhere does not keep it out.
        """
        crowd, _ = Counter(unproven.address for unproven in self._unproven.values()).most_common(1)[0]
        candidates = [unproven for unproven in self._unproven.values() if unproven.address == crowd]
        return next((unproven for unproven in candidates if not unproven.has_begun), candidates[0])

    def refuse(self, unproven: Unproven, why: str) -> None:
        self._refusals.warning("refused a connection to %s: %s", self._worker, why)
        self._drop(unproven)
        unproven.sock.close()

    def admit(self, unproven: Unproven, peer: Identity) -> None:
        self._drop(unproven)
        self._on_proven(unproven.stream, peer)

    def _drop(self, unproven: Unproven) -> None:
        self._unproven.pop(unproven.sock.fileno(), None)
        self._loop.remove(unproven.sock.fileno())

    def expire(self, now: float) -> float:
        """Refuse peers that take too long to prove themselves; when to look again (0: not)."""
        for unproven in [u for u in self._unproven.values() if u.deadline <= now]:
            self.refuse(unproven, f"it did not prove itself within {HANDSHAKE_SECONDS:.0f} s")
        if self._deaf_until and self._deaf_until <= now:
            self._deaf_until = 0.0
            for listener in self._listeners:
                self._loop.change(listener.fileno(), IN)
        times = [unproven.deadline for unproven in self._unproven.values()]
        if self._deaf_until:
            times.append(self._deaf_until)
        return min(times, default=0.0)

    def close(self) -> None:
        for listener in self._listeners:
            self._loop.remove(listener.fileno())
            listener.close()
        for unproven in list(self._unproven.values()):
            self._drop(unproven)
            unproven.sock.close()

    def abandon(self) -> None:
        """In a forked child: close the descriptors without a word to the peers."""
        for sock in (*self._listeners, *(u.sock for u in self._unproven.values())):
            sock.close()
