"""Dials other workers: connects, makes TLS, and authenticates both ends."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable

from farprop.config import Settings
from farprop.errors import AuthenticationError, ConnectionLostError, ProtocolError
from farprop.protocol.handshake import CHALLENGE, READY, DialerHandshake, IdentityMismatchError, ListenerHandshake
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import Keys
from farprop.transport import sockets
from farprop.transport.tls import Certificates, Stream, TlsSocket

_UNIX, _TCP = b"unix", b"tcp"
_TLS_BYTES = 4096  # read at a time while TLS is made
_ATTEMPTS = 4
_LEAST_SECONDS = 0.25


class WrongPeerError(ConnectionLostError):
    """The worker's address now belongs to another process."""


class UnresponsiveError(ConnectionLostError):
    """The worker accepts connections but does not answer: it is stopped, or very busy."""


class _CutShort(ConnectionLostError):
    """The peer closed the connection before it was authenticated."""


class _Unanswered(AuthenticationError):
    """The peer received our proof, and closed the connection."""


class Dialer:
    """Makes both ends of authenticated connections, with the identity of this worker.

    Args:
        identity: the identity of this worker.
        keys: the keys of the job.
        unix_allowed: whether to use Unix sockets to workers of the same host.
        settings: the settings of this process.
    """

    def __init__(self, identity: Identity, keys: Keys, unix_allowed: bool, settings: Settings) -> None:
        self.net = sockets.network_namespace()
        self.unix_allowed = unix_allowed
        self.is_encrypted = settings.tls
        self._identity = identity.to_bytes()
        self._keys = keys
        self._certificates = Certificates(settings.tls_files) if settings.tls else None

    def prepare(self, entries: Iterable[Entry]) -> None:
        """Make the certificate now if connections with these workers need it: in the loop it would block others."""
        if self._certificates is not None and not all(self.is_near(entry) for entry in entries):
            self._certificates.prepare()

    def is_near(self, entry: Entry) -> bool:
        """Whether a worker is on this host, and reached by a Unix socket."""
        return self.unix_allowed and bool(entry.unix) and entry.net == self.net

    # Accepting

    def accepted(self, sock: socket.socket) -> tuple[ListenerHandshake, TlsSocket | None]:
        """Return the handshake for an accepted connection, and the TLS to make first, if any."""
        if sock.family == socket.AF_UNIX:
            sockets.check_user(sock)
            return self._listener(_UNIX), None
        if self._certificates is None:
            return self._listener(_TCP), None
        tls, channel = self._certificates.accept(sock)
        return self._listener(channel), tls

    def _listener(self, channel: bytes) -> ListenerHandshake:
        return ListenerHandshake(self._keys.handshake, self._identity, channel, secrets.token_bytes(32))

    # Dialling

    def dial(self, entry: Entry, deadline: float) -> Stream:
        # The timeout of a call may be shorter than any dialling takes. The call should still reach the worker, as it
        # would on an open connection.
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
                # A worker under a flood drops pending connections, so try again. A worker that has ended refuses them.
                if time.monotonic() + pause > deadline:
                    raise
            time.sleep(pause)
        return self._dial_once(entry, deadline)

    def _dial_once(self, entry: Entry, deadline: float) -> Stream:
        sock = sockets.connect(entry, self.is_near(entry), deadline)
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
        machine = DialerHandshake(self._keys.handshake, self._identity, target, channel, secrets.token_bytes(32))
        to_send = machine.start()
        while machine.state != READY:
            if to_send:
                stream.sendall(to_send)
            data = _receive(stream, machine.wanted, deadline)
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
            except IdentityMismatchError as error:
                raise WrongPeerError(str(error)) from error
        return stream


def _make_tls(stream: TlsSocket, sock: socket.socket, deadline: float) -> None:
    is_made, to_send = stream.handshake(b"")
    while True:
        if to_send:
            sock.sendall(to_send)
        if is_made:
            return
        data = _receive(sock, _TLS_BYTES, deadline)
        if not data:
            raise ProtocolError("it closed the connection before TLS was made: is FARPROP_TLS the same on all workers?")
        is_made, to_send = stream.handshake(data)


def _receive(stream: Stream, most: int, deadline: float) -> bytes:
    """Receive the next bytes, at most ``most``. The deadline is that of the whole handshake."""
    while True:
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            stream.settimeout(left)
            return stream.recv(most)
        except TimeoutError as error:
            raise UnresponsiveError("it accepts connections, but does not answer") from error
        except BlockingIOError:
            pass  # a part of a record
