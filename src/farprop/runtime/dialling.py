"""Reaching another worker: a stream on which both have proved who they are and that they know the secret."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable

from farprop.config import Settings
from farprop.errors import AuthenticationError, ConnectionLostError, ProtocolError
from farprop.protocol.handshake import CHALLENGE, READY, Dialler, Listener, SomebodyElseError
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import Keys
from farprop.transport import sockets
from farprop.transport.tls import Certificates, Stream, TlsSocket

_UNIX, _TCP = b"unix", b"tcp"
_ATTEMPTS = 4
_LEAST_SECONDS = 0.25


class SomebodyElse(ConnectionLostError):
    """The worker's address belongs to another process now."""


class Unresponsive(ConnectionLostError):
    """The worker accepts connections and does not answer: it is stopped, or very busy."""


class _CutShort(ConnectionLostError):
    """The connection was made, and closed before it was known with whom."""


class _Unanswered(AuthenticationError):
    """The other end heard our proof, and closed the connection."""


class Dialling:
    """Who we are, when we dial and when we are dialled."""

    def __init__(self, identity: Identity, keys: Keys, unix_allowed: bool, settings: Settings) -> None:
        self.net = sockets.network_namespace()
        self.unix_allowed = unix_allowed
        self.is_encrypted = settings.tls
        self._identity = identity.to_bytes()
        self._keys = keys
        self._certificates = Certificates(settings.tls_files) if settings.tls else None

    def prepare(self, entries: Iterable[Entry]) -> None:
        """Make what connections with these workers need: in the loop, making the certificate would hold others up."""
        if self._certificates is not None and not all(self._is_near(entry) for entry in entries):
            self._certificates.prepare()

    def _is_near(self, entry: Entry) -> bool:
        return self.unix_allowed and bool(entry.unix) and entry.net == self.net

    # Being dialled

    def accepted(self, sock: socket.socket) -> tuple[Listener, TlsSocket | None]:
        """The machine that answers somebody who dials us, and the TLS that has to be made first."""
        if sock.family == socket.AF_UNIX:
            sockets.check_user(sock)
            return self._listener(_UNIX), None
        if self._certificates is None:
            return self._listener(_TCP), None
        tls, channel = self._certificates.accept(sock)
        return self._listener(channel), tls

    def _listener(self, channel: bytes) -> Listener:
        return Listener(self._keys.handshake, self._identity, channel, secrets.token_bytes(32))

    # Dialling

    def dial(self, entry: Entry, deadline: float) -> Stream:
        # A call may give less time than any connection needs. It should still reach the worker, as it does over one
        # that is there already.
        deadline = max(deadline, time.monotonic() + _LEAST_SECONDS)
        try:
            return self._dial(entry, deadline)
        except _Unanswered as error:
            raise AuthenticationError(str(error)) from error
        except ConnectionLostError as error:
            kind = ConnectionLostError if isinstance(error, _CutShort) else type(error)
            raise kind(
                f"Can't reach {entry.name} ({entry.host}, pid {entry.pid}): {error}. It has shut down or died, or the "
                "network is cut."
            ) from error

    def _dial(self, entry: Entry, deadline: float) -> Stream:
        for attempt in range(1, _ATTEMPTS):
            pause = 0.05 * attempt
            try:
                return self._dial_once(entry, deadline)
            except (_CutShort, _Unanswered):
                # A worker that many strangers dial drops those that wait. One that has ended can't be connected to.
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
        return self._dial_once(entry, deadline)

    def _dial_once(self, entry: Entry, deadline: float) -> Stream:
        sock = sockets.connect(entry, self._is_near(entry), deadline)
        try:
            stream = self._prove(entry, sock, deadline)
            if isinstance(stream, TlsSocket):
                stream.know_peer()
            sockets.make_ready(stream)
            return stream
        except ConnectionLostError:
            sock.close()
            raise
        except OSError as error:
            sock.close()
            kind = _CutShort if isinstance(error, ConnectionError) else ConnectionLostError
            raise kind(f"can't connect: {error}") from error
        except BaseException:
            sock.close()
            raise

    def _prove(self, entry: Entry, sock: socket.socket, deadline: float) -> Stream:
        stream: Stream = sock
        if sock.family == socket.AF_UNIX:
            sockets.check_user(sock)
            channel = _UNIX
        elif self._certificates is None:
            channel = _TCP
        else:
            stream = self._certificates.dial(sock)
            _make_tls(stream, sock, deadline)
            channel = stream.peer_channel()
        target = entry.identity.to_bytes()
        machine = Dialler(self._keys.handshake, self._identity, target, channel, secrets.token_bytes(32))
        to_send = machine.start()
        while machine.state != READY:
            if to_send:
                stream.sendall(to_send)
            data = _receive(stream, deadline)
            if not data and machine.state != CHALLENGE:
                raise _CutShort("it closed the connection before it answered")
            if not data:
                raise _Unanswered(
                    f"{entry.name} closed the connection during the handshake: it does not know this job's secret, or "
                    "somebody in between has changed or relayed what was sent. All workers need the same "
                    "FARPROP_SECRET."
                )
            try:
                to_send = machine.receive(data)
            except SomebodyElseError as error:
                raise SomebodyElse(str(error)) from error
        return stream


def _make_tls(stream: TlsSocket, sock: socket.socket, deadline: float) -> None:
    is_made, to_send = stream.handshake(b"")
    while True:
        if to_send:
            sock.sendall(to_send)
        if is_made:
            return
        data = _receive(sock, deadline)
        if not data:
            raise ProtocolError("it closed the connection before TLS was made: is FARPROP_TLS the same on all workers?")
        is_made, to_send = stream.handshake(data)


def _receive(stream: Stream, deadline: float) -> bytes:
    """What comes next, before a deadline that holds for the whole handshake."""
    while True:
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            stream.settimeout(left)
            return stream.recv(4096)
        except TimeoutError as error:
            raise Unresponsive("it accepts connections, and does not answer") from error
        except BlockingIOError:
            pass  # a part of a record
