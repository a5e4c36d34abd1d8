"""TLS 1.3 on a connected socket.

OpenSSL works on memory here, never on the socket. So a socket is polled, read and written by whoever does it without
TLS, too, and a thread that encrypts never waits for the network. Rules that hold here:

- One thread reads at a time, and one sends; the callers see to that. What both need of OpenSSL is under the lock.
- A send takes whole pieces of at most ``_PIECE`` bytes. Of the last one, what the system has not taken is kept in
  ``unsent``, and goes out first: by the next send, or by ``flush`` when the socket is writable.
- What was received is decrypted before the socket is read again. While ``has_more``, the socket may stay silent.
- What was altered on its way is a ``ProtocolError``. So is a peer that asks for new keys again and again, which costs
  time and memory.
"""

from __future__ import annotations

import hashlib
import os
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from farprop.errors import ProtocolError, UsageError

_PIECE = 256 << 10
_RECORD = 16 << 10
_STRANGERS_PIECE = 4 << 10
_MOST_ANSWERS = 4 << 10  # bytes that TLS wants to say by itself


class TlsSocket:
    """As much of a socket's interface as connections use."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        self.family = sock.family
        self.unsent: Any = b""
        self.has_more = False
        self.received_bytes = 0  # before the peer was known
        self._is_known = False
        self._sock = sock
        self._lock = threading.Lock()
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = context.wrap_bio(self._incoming, self._outgoing, server_side)

    # Making the connection

    def handshake(self, data: bytes) -> tuple[bool, bytes]:
        """What came from the peer; whether the connection is made, and what to send to the peer in any case."""
        self._incoming.write(data)
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False, self._outgoing.read()
        except ssl.SSLError as error:
            raise ProtocolError(f"no TLS connection could be made ({_reason(error)})") from error
        self.has_more = bool(self._incoming.pending)
        return True, self._outgoing.read()

    def last_words(self) -> bytes:
        """What to send to a peer with which no connection could be made: TLS's reason."""
        return self._outgoing.read()

    def know_peer(self) -> None:
        """The peer has proved who it is: from now on large pieces are read from it."""
        self._is_known = True

    def peer_channel(self) -> bytes:
        """The channel of a connection to the listener whose certificate was shown."""
        return channel(self._tls.getpeercert(binary_form=True) or b"")

    # Sending

    def send(self, data: Any, flags: int = 0) -> int:
        if len(data) > _PIECE or self.unsent:
            return self.sendmsg((data,), (), flags)
        return self._send_piece(data, flags)

    def sendmsg(self, parts: Sequence[Any], ancillary: Sequence[Any] = (), flags: int = 0) -> int:
        """As a socket's: the count of bytes that were taken. Some of them may be in ``unsent``."""
        if ancillary:
            raise UsageError("Descriptors can't be passed to another host.")
        if self.unsent and not self.flush(flags):
            raise BlockingIOError
        count = 0
        for piece in _pieces(parts):
            count += self._send_piece(piece, flags)
            if self.unsent:
                break
        return count

    def _send_piece(self, piece: Any, flags: int) -> int:
        with self._lock:
            count: int = self._tls.write(piece)
            sealed = self._outgoing.read()
        try:
            sent = self._sock.send(sealed, flags)
        except BlockingIOError:
            sent = 0
        if sent < len(sealed):
            self.unsent = memoryview(sealed)[sent:]
        return count

    def flush(self, flags: int = 0) -> bool:
        """Send what is left; False if the system does not take all of it."""
        try:
            self.unsent = self.unsent[self._sock.send(self.unsent, flags) :]
        except BlockingIOError:
            return False
        return not self.unsent

    def sendall(self, data: Any) -> None:
        """For a socket that blocks."""
        view = memoryview(data)
        while view or self.unsent:
            if view:
                view = view[self.send(view) :]
            else:
                self.flush()

    # Receiving

    def recv_into(self, target: Any, _: int = 0, flags: int = 0) -> int:
        """As a socket's. Raises BlockingIOError also if less than a record has come."""
        incoming, tls = self._incoming, self._tls
        data: Any = b""
        if not self.has_more:
            buffer = _received.buffer if self._is_known else _received.small
            received = self._sock.recv_into(buffer, 0, flags)
            if not received:
                return 0
            self.received_bytes += received
            data = buffer[:received]
        count, size = 0, len(target)
        try:
            with self._lock:
                if data:
                    incoming.write(data)
                count = tls.read(size, target)
                # Most often that was the only record. If there is room left, nothing is left of one.
                while incoming.pending and count < size:
                    count += tls.read(size - count, target[count:])
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self.has_more = False
            return count
        except ssl.SSLError as error:
            raise ProtocolError(f"what it sent was altered on its way, or is no TLS ({_reason(error)})") from error
        self.has_more = count == size and bool(incoming.pending or tls.pending())
        if not count:
            if self._outgoing.pending > _MOST_ANSWERS:
                raise ProtocolError("it asks for new keys again and again")
            raise BlockingIOError
        return count

    def recv(self, size: int, flags: int = 0) -> bytes:
        target = memoryview(bytearray(size))
        return bytes(target[: self.recv_into(target, 0, flags)])

    # What is the socket's own

    def fileno(self) -> int:
        return self._sock.fileno()

    def settimeout(self, seconds: float | None) -> None:
        self._sock.settimeout(seconds)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._sock.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        return self._sock.getsockopt(level, option, size) if size else self._sock.getsockopt(level, option)

    def shutdown(self, how: int) -> None:
        self._sock.shutdown(how)

    def close(self) -> None:
        self._sock.close()


Stream = socket.socket | TlsSocket


class _Received(threading.local):
    """What a thread reads from a socket is in OpenSSL's memory when it reads from the next."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_PIECE))
        self.small = self.buffer[:_STRANGERS_PIECE]


_received = _Received()


def _pieces(parts: Sequence[Any]) -> Iterator[Any]:
    """Small parts together, in one record; large ones in pieces."""
    if len(parts) > 1 and sum(map(len, parts)) <= _RECORD:
        yield b"".join(parts)
        return
    for part in parts:
        if len(part) <= _PIECE:
            if len(part):
                yield part
            continue
        view = memoryview(part)
        for start in range(0, len(view), _PIECE):
            yield view[start : start + _PIECE]


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


def channel(certificate: bytes) -> bytes:
    """What both ends of a TLS connection put into their proofs: which certificate the listener showed."""
    return b"tls " + hashlib.sha256(certificate).digest()


class Certificates:
    """The contexts of one worker. ``files`` are certificate, key and CA; without, a certificate is made on first use,
    and nobody has to trust it: the handshake above TLS proves whose it is.
    """

    def __init__(self, files: tuple[str, str, str] | None) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._listener: tuple[ssl.SSLContext, bytes] | None = None
        self._dialler: ssl.SSLContext | None = None
        if files is not None:
            self.prepare()  # so that wrong files are found out at the start

    def prepare(self) -> None:
        """Make the contexts now, and not when a connection waits for them."""
        self._for_listener()
        self._for_dialler()

    def accept(self, sock: socket.socket) -> tuple[TlsSocket, bytes]:
        """The listener's end on a new connection, and its channel."""
        context, own_channel = self._for_listener()
        return TlsSocket(sock, context, server_side=True), own_channel

    def dial(self, sock: socket.socket) -> TlsSocket:
        """The dialler's end."""
        return TlsSocket(sock, self._for_dialler(), server_side=False)

    def _for_dialler(self) -> ssl.SSLContext:
        with self._lock:
            if self._dialler is None:
                self._dialler = _context(ssl.PROTOCOL_TLS_CLIENT, self._files)
            return self._dialler

    def _for_listener(self) -> tuple[ssl.SSLContext, bytes]:
        with self._lock:
            if self._listener is None:
                context = _context(ssl.PROTOCOL_TLS_SERVER, self._files)
                context.num_tickets = 0  # sessions are not resumed
                if self._files is not None:
                    certificate = _first_certificate(self._files[0])
                else:
                    key, certificate = _throw_away()
                    with _as_file(key + ssl.DER_cert_to_PEM_cert(certificate).encode()) as path:
                        context.load_cert_chain(path)
                self._listener = context, channel(certificate)
            return self._listener


def _context(protocol: int, files: tuple[str, str, str] | None) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if files is not None:
        certificate, key, ca = files
        try:
            context.load_cert_chain(certificate, key)
            context.load_verify_locations(ca)
        except (OSError, ssl.SSLError) as error:
            raise UsageError(
                f"The files of FARPROP_TLS_CERT, FARPROP_TLS_KEY and FARPROP_TLS_CA ({certificate}, {key}, {ca}) can't "
                f"be used: {error}. They have to be in PEM format, and the key without a password."
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _first_certificate(path: str) -> bytes:
    with open(path) as file:
        text = file.read()
    end = "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)])


def _throw_away() -> tuple[bytes, bytes]:
    """A private key in PEM format, and a certificate for it in DER format."""
    # Imported here: workers of one host never need it.
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "farprop")])
    day = datetime.timedelta(days=1)
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - day)
        .not_valid_after(now + 3650 * day)
        .sign(key, hashes.SHA256())
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return pem, certificate.public_bytes(serialization.Encoding.DER)


@contextmanager
def _as_file(data: bytes) -> Iterator[str]:
    """``ssl`` reads keys from files alone. This one is in memory where the system can do that."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("farprop-key", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, data)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            yield file.name
