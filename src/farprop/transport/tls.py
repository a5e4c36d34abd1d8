"""TLS 1.3 on a connected socket.

OpenSSL works on memory buffers here, never on the socket. So the same code polls, reads and writes a socket with and
without TLS, and a thread that encrypts never waits for the network. Rules that hold here:

- One thread reads at a time, and one sends; the callers ensure it. OpenSSL's shared state is used under the lock.
- A send takes whole pieces of at most ``_PIECE`` bytes. If the kernel does not take all of the last piece, the rest is
  kept in ``unsent`` and sent first: by the next send, or by ``flush`` when the socket is writable.
- Received bytes are decrypted before the socket is read again. While ``has_more`` is true, decrypted bytes may be left
  although the socket is not readable.
- Altered bytes raise ``ProtocolError``. So does a peer that keeps asking for new keys, which costs time and memory.
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
from farprop.locks import make_lock

_PIECE = 256 << 10
_RECORD = 16 << 10
_STRANGERS_PIECE = 4 << 10
_MOST_ANSWERS = 4 << 10  # bytes that TLS may send by itself


class TlsSocket:
    """Implements the part of a socket's interface that connections use."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server_side: bool) -> None:
        self.family = sock.family
        self.unsent: Any = b""
        self.has_more = False
        self.received_bytes = 0  # counted until the peer is authenticated
        self._is_known = False
        self._sock = sock
        self._lock = make_lock("tls_socket")
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls: Any = context.wrap_bio(self._incoming, self._outgoing, server_side)

    # Making the connection

    def handshake(self, data: bytes) -> tuple[bool, bytes]:
        """Continue the TLS handshake.

        Args:
            data: bytes from the peer.

        Returns:
            Whether the handshake is complete, and bytes to send to the peer.

        Raises:
            ProtocolError: the handshake failed.
        """
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
        """TLS's alert for a peer whose handshake failed."""
        return self._outgoing.read()

    def know_peer(self) -> None:
        """The peer is authenticated: read large pieces from now on."""
        self._is_known = True

    def peer_channel(self) -> bytes:
        """The channel binding, from the certificate that the listener showed."""
        return channel(self._tls.getpeercert(binary_form=True) or b"")

    # Sending

    def send(self, data: Any, flags: int = 0) -> int:
        if len(data) > _PIECE or self.unsent:
            return self.sendmsg((data,), (), flags)
        return self._send_piece(data, flags)

    def sendmsg(self, parts: Sequence[Any], ancillary: Sequence[Any] = (), flags: int = 0) -> int:
        """Like ``socket.sendmsg``; returns the number of bytes taken. Some of them may be in ``unsent``."""
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
        """Send the bytes in ``unsent``; False if the kernel does not take all of them."""
        try:
            self.unsent = self.unsent[self._sock.send(self.unsent, flags) :]
        except BlockingIOError:
            return False
        return not self.unsent

    def sendall(self, data: Any) -> None:
        """Like ``socket.sendall``, for a blocking socket."""
        view = memoryview(data)
        while view or self.unsent:
            if view:
                view = view[self.send(view) :]
            else:
                self.flush()

    # Receiving

    def recv_into(self, target: Any, _: int = 0, flags: int = 0) -> int:
        """Like ``socket.recv_into``. Also raises BlockingIOError if less than a TLS record has arrived."""
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
                # Most often that was the only record. If ``target`` has room left, the record is used up.
                while incoming.pending and count < size:
                    count += tls.read(size - count, target[count:])
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
            self.has_more = False
            return count
        except ssl.SSLError as error:
            reason = _reason(error)
            if "alert" in reason:
                # In TLS 1.3 the dialling end has finished the handshake before the other one looks at its certificate.
                raise ProtocolError(
                    f"it ended TLS ({reason}). If the job has certificates of its own, it refuses this worker's: look "
                    "at FARPROP_TLS_CERT here and FARPROP_TLS_CA there"
                ) from error
            raise ProtocolError(f"what it sent was altered on its way, or is not TLS ({reason})") from error
        self.has_more = count == size and bool(incoming.pending or tls.pending())
        if not count:
            if self._outgoing.pending > _MOST_ANSWERS:
                raise ProtocolError("it keeps asking for new keys")
            raise BlockingIOError
        return count

    def recv(self, size: int, flags: int = 0) -> bytes:
        target = memoryview(bytearray(size))
        return bytes(target[: self.recv_into(target, 0, flags)])

    # Delegated to the socket

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
    """A receive buffer per thread. A read copies it into OpenSSL's memory, so all sockets can share it."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(_PIECE))
        self.small = self.buffer[:_STRANGERS_PIECE]


_received = _Received()


def _pieces(parts: Sequence[Any]) -> Iterator[Any]:
    """Join small parts into one record, and cut large ones into pieces."""
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
    """The channel binding: both ends put the listener's certificate, as they see it, into their proofs."""
    return b"tls " + hashlib.sha256(certificate).digest()


class Certificates:
    """The TLS contexts of one worker.

    ``files`` are the user's certificate, key and CA. Without them a self-signed certificate is made on first use. No CA
    vouches for it: the handshake above TLS proves whose it is.
    """

    def __init__(self, files: tuple[str, str, str] | None) -> None:
        self._files = files
        self._lock = make_lock("tls_contexts")
        self._listener: tuple[ssl.SSLContext, bytes] | None = None
        self._dialer: ssl.SSLContext | None = None
        if files is not None:
            self.prepare()  # fail early if the files are wrong

    def prepare(self) -> None:
        """Make the contexts before a connection needs them."""
        self._for_listener()
        self._for_dialer()

    def accept(self, sock: socket.socket) -> tuple[TlsSocket, bytes]:
        """Return the listener's end of a new connection, and its channel binding."""
        context, own_channel = self._for_listener()
        return TlsSocket(sock, context, server_side=True), own_channel

    def dial(self, sock: socket.socket) -> TlsSocket:
        """Return the dialer's end of a new connection."""
        return TlsSocket(sock, self._for_dialer(), server_side=False)

    def _for_dialer(self) -> ssl.SSLContext:
        with self._lock:
            if self._dialer is None:
                self._dialer = _context(ssl.PROTOCOL_TLS_CLIENT, self._files)
            return self._dialer

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
    """Make a private key, in PEM format, and a self-signed certificate for it, in DER format."""
    # Imported here, because workers of one host never need it.
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
    """A file with this content, because ``ssl`` reads keys from files alone. On Linux it is in memory."""
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
