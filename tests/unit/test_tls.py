"""TLS on a socket: reads and writes of any size, from several threads; altered bytes are refused."""

from __future__ import annotations

import os
import random
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from farprop.config import Settings
from farprop.errors import ProtocolError, UsageError
from farprop.protocol.handshake import VERSION
from farprop.transport.tls import Certificates, TlsSocket, channel
from tests.support.certificate_authority import CertificateAuthority

DONTWAIT = socket.MSG_DONTWAIT


def connect(dialer: Certificates, listener: Certificates) -> tuple[TlsSocket, TlsSocket, bytes]:
    """Both ends of a TLS connection in memory, and the listener's channel binding."""
    ours, theirs = socket.socketpair()
    client = dialer.dial(ours)
    server, listeners_channel = listener.accept(theirs)
    try:
        is_made = [False, False]
        is_made[0], to_send = client.handshake(b"")
        while to_send:
            is_made[1], to_send = server.handshake(to_send)
            if to_send or not is_made[0]:
                is_made[0], to_send = client.handshake(to_send)
        assert is_made == [True, True]
    except BaseException:
        client.close()
        server.close()
        raise
    return client, server, listeners_channel


@contextmanager
def pair() -> Iterator[tuple[TlsSocket, TlsSocket]]:
    client, server, _ = connect(Certificates(None), Certificates(None))
    with closing(client), closing(server):
        yield client, server


def read_all(end: TlsSocket, count: int, largest: int = 1 << 20) -> bytes:
    """Read like a connection that polls its socket."""
    received = bytearray()
    while len(received) < count:
        if not end.has_more:
            assert select.select([end], [], [], 20)[0], f"nothing comes after {len(received)} bytes"
        room = memoryview(bytearray(random.randint(1, largest)))
        try:
            got = end.recv_into(room, 0, DONTWAIT)
        except BlockingIOError:
            continue
        assert got
        received += room[:got]
    return bytes(received)


def write_all(end: TlsSocket, parts: list[bytes]) -> None:
    """Send like a connection that must not block."""
    views = [memoryview(part) for part in parts]
    while views or end.unsent:
        try:
            sent = end.sendmsg(views, (), DONTWAIT)
        except BlockingIOError:
            assert select.select([], [end], [], 20)[1]
            continue
        while views and sent >= len(views[0]):
            sent -= len(views.pop(0))
        if sent:
            views[0] = views[0][sent:]


def test_both_ends_see_the_same_certificate() -> None:
    client, server, seen = connect(Certificates(None), listener := Certificates(None))
    with closing(client), closing(server):
        assert client.peer_channel() == seen
        assert client._tls.version() == server._tls.version() == "TLSv1.3"
    another = connect(Certificates(None), Certificates(None))
    for end in another[:2]:
        end.close()
    assert another[2] != seen  # each process has its own certificate
    again = connect(Certificates(None), listener)
    for end in again[:2]:
        end.close()
    assert again[2] == seen  # and uses it for all connections


@pytest.mark.parametrize("largest", [1, 100, 20_000, 1 << 20])
def test_stream_arrives_whole_whatever_the_piece_sizes(largest: int) -> None:
    parts = [os.urandom(random.choice([0, 1, 5, 300, 16 << 10, 300_000])) for _ in range(30 if largest > 1 else 3)]
    whole = b"".join(parts)
    with pair() as (client, server):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5000)
        sender = threading.Thread(target=write_all, args=(client, parts))
        sender.start()
        assert read_all(server, len(whole), largest) == whole
        sender.join()


def test_both_directions_at_once_from_four_threads() -> None:
    there, back = os.urandom(3 << 20), os.urandom(3 << 20)
    got: dict[str, bytes] = {}
    with pair() as (client, server):
        threads = [
            threading.Thread(target=write_all, args=(client, [there])),
            threading.Thread(target=write_all, args=(server, [back])),
            threading.Thread(target=lambda: got.update(there=read_all(server, len(there)))),
            threading.Thread(target=lambda: got.update(back=read_all(client, len(back)))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {"there": there, "back": back}


def test_encrypted_bytes_are_kept_when_the_socket_is_full() -> None:
    with pair() as (client, server):
        data = os.urandom(1 << 20)
        taken = 0
        with pytest.raises(BlockingIOError):
            while True:
                taken += client.send(data, DONTWAIT)
        assert client.unsent
        assert not client.flush(DONTWAIT)
        received = bytearray()
        while len(received) < taken:
            received += read_all(server, min(1 << 16, taken - len(received)), 1 << 16)
            client.flush(DONTWAIT)
        assert not client.unsent
        assert received[:1000] == data[:1000]
        client.sendall(b"end")
        assert read_all(server, 3) == b"end"


@pytest.mark.parametrize("at", [0, 3, 20, -1])
def test_altered_byte_is_a_protocol_error(at: int) -> None:
    with pair() as (client, server):
        client._tls.write(b"a word that somebody changes")
        sealed = bytearray(client._outgoing.read())
        sealed[at] ^= 1
        client._sock.sendall(sealed + bytes(20_000 if at == 3 else 0))  # byte 3 is in the length field
        with pytest.raises(ProtocolError, match="altered on its way"):
            while True:
                server.recv(100)


def test_end_of_stream_and_plaintext_peer() -> None:
    with pair() as (client, server):
        client.close()
        assert server.recv(10) == b""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        server, _ = Certificates(None).accept(theirs)
        with pytest.raises(ProtocolError, match="no TLS connection could be made"):
            server.handshake(b"FARPROP\n" + VERSION.to_bytes(2, "little") + bytes(32))
        with pytest.raises(UsageError, match="can't be passed"):
            server.sendmsg([b"x"], [(1, 1, b"")])


# The user's own certificates


def test_own_certificates_must_be_signed_by_the_authority(tmp_path: Path) -> None:
    ours, other = CertificateAuthority(tmp_path, "ours"), CertificateAuthority(tmp_path, "other")
    one, two = Certificates(ours.issue("one")), Certificates(ours.issue("two"))
    client, server, seen = connect(one, two)
    with closing(client), closing(server):
        assert client.peer_channel() == seen == channel(client._tls.getpeercert(binary_form=True))
    stranger = Certificates(other.issue("stranger"))
    for dialer, listener in ((stranger, one), (one, stranger), (Certificates(None), one), (one, Certificates(None))):
        with pytest.raises(ProtocolError, match="no TLS connection"):
            connect(dialer, listener)


def test_a_worker_whose_certificate_is_refused_is_told_what_to_look_at(tmp_path: Path) -> None:
    ours, other = CertificateAuthority(tmp_path, "ours"), CertificateAuthority(tmp_path, "other")
    listeners, (certificate, key, _) = ours.issue("listener"), other.issue("dialer")
    ends = socket.socketpair()
    client = Certificates((certificate, key, listeners[2])).dial(ends[0])
    server, _ = Certificates(listeners).accept(ends[1])
    with closing(client), closing(server):
        _, hello = client.handshake(b"")
        is_made, finished = client.handshake(server.handshake(hello)[1])
        assert is_made
        with pytest.raises(ProtocolError, match="no TLS connection could be made"):
            server.handshake(finished)
        ends[1].sendall(server.last_words())
        with pytest.raises(ProtocolError, match=r"it ended TLS \(.*FARPROP_TLS_CERT here and FARPROP_TLS_CA there"):
            client.recv(100)


def test_unusable_certificate_files_are_reported_at_startup(tmp_path: Path) -> None:
    certificate, key, ca = CertificateAuthority(tmp_path, "ours").issue("one")
    for files in ((certificate, "/nowhere", ca), (key, key, ca), (certificate, key, "/nowhere")):
        with pytest.raises(UsageError, match="FARPROP_TLS_CERT.*can't be used"):
            Certificates(files)
    env = {"FARPROP_TLS_CERT": certificate, "FARPROP_TLS_KEY": key, "FARPROP_TLS_CA": ca}
    assert Settings.from_env(env).tls_files == (certificate, key, ca)
    with pytest.raises(UsageError, match="go together"):
        Settings.from_env({"FARPROP_TLS_CERT": certificate})
    with pytest.raises(UsageError, match="FARPROP_TLS='yes' is not known"):
        Settings.from_env({"FARPROP_TLS": "yes"})
