"""An attacker who reaches the workers' ports can use up neither their time nor their memory nor their connections."""

from __future__ import annotations

import ctypes
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

import farprop.rpc as rpc
from farprop.config import Settings
from farprop.protocol.handshake import VERSION
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import CALLS, Keys
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.dialer import Dialer, UnresponsiveError
from farprop.transport.tls import Certificates, TlsSocket
from tests.calls import functions as f
from tests.support.peers import dial_as, hangs_up, own_entry, own_keys
from tests.support.workers import cluster

SLOW = 1500
# The part of the first message that a slow peer sends: nothing, some of TLS's, some of farprop's.
BEGINNINGS = [b"", b"\x16\x03\x01\x02\x00\x01", b"FARPROP"]


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2 * SLOW:
        pytest.skip(f"a process can open only {hard} files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * SLOW), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _pending_handshakes() -> int:
    return len(current_agent()._accepted._acceptor._pending)


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_slow_peers_do_not_block_other_workers(many_files: None, kind: str) -> None:
    with cluster(2, {"FARPROP_TRANSPORT": "tcp"} if kind == "tcp" else None, check=False) as job, ExitStack() as held:
        entry, other, keys = job.run(0, own_entry), job.run(1, own_entry), job.run(0, own_keys)
        before = job.run(0, _rss)
        for number in range(SLOW):
            sock = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
            held.enter_context(sock)
            sock.settimeout(20)
            sock.connect("\0" + entry.unix if kind == "unix" else tuple(entry.tcp))
            try:
                sock.send(BEGINNINGS[number % len(BEGINNINGS)])
            except ConnectionError:
                pass  # dropped already
            if number % 300 == 0:
                # Calls still work, and a new worker can connect.
                assert job.run(1, rpc.rpc_sync, "worker0", f.add, (number,)) == number + 1
                dial_as(other.identity, keys, entry, kind).close()
        assert job.run(0, _pending_handshakes) <= 256
        assert job.run(1, rpc.rpc_sync, "worker0", f.add, (1,)) == 2
        assert job.run(0, _rss) - before < 100 << 20


class Trickle:
    """Listens, and sends a byte now and then to each peer that dials, forever."""

    def __init__(self, kind: str) -> None:
        self.name = f"farprop-test-{time.monotonic_ns()}"
        self._unix = socket.socket(socket.AF_UNIX)
        self._unix.bind("\0" + self.name)
        self._tcp = socket.create_server(("127.0.0.1", 0))
        self._unix.listen()
        self._ended = threading.Event()
        self.entry = Entry(
            "worker1", 1, 2, "x", self._tcp.getsockname(), self.name if kind == "unix" else "",
            Dialer(OWN_IDENTITY, KEYS, True, Settings()).net, "here", 1, False,
        )  # fmt: skip
        self.was_cut = False
        self._thread = threading.Thread(target=self._run, args=(self._unix if kind == "unix" else self._tcp, kind))
        self._thread.start()

    def _run(self, listener: socket.socket, kind: str) -> None:
        sock, _ = listener.accept()
        beginning = b"\x16\x03\x03\x40\x00" if kind == "tls" else b"FARPROP\n" + VERSION.to_bytes(2, "little")
        with sock:
            for byte in [*beginning, *bytes(10_000)]:
                try:
                    sock.send(bytes([byte]))
                except ConnectionError:
                    self.was_cut = True
                    return
                if self._ended.wait(0.05):
                    return

    def close(self) -> None:
        self._thread.join(20)
        self._ended.set()
        self._thread.join()
        self._unix.close()
        self._tcp.close()


OWN_IDENTITY = Identity("worker0", 0, "mine", 1 << 20)
KEYS = Keys(b"k" * 32, "job", CALLS)


@contextmanager
def _trickling(kind: str) -> Iterator[Trickle]:
    with closing(Trickle(kind)) as listener:
        yield listener


@pytest.mark.parametrize("kind", ["unix", "tcp", "tls"])
def test_dial_of_a_trickling_listener_ends_at_its_deadline(kind: str) -> None:
    with _trickling(kind) as listener:
        our_dialer = Dialer(OWN_IDENTITY, KEYS, kind == "unix", Settings(tls=kind == "tls"))
        with pytest.raises(UnresponsiveError, match="does not answer"):
            our_dialer.dial(listener.entry, time.monotonic() + 1.0)
    assert listener.was_cut  # while it had thousands of bytes left


def _key_updates(tls: TlsSocket, count: int) -> bytes:
    """The bytes of a peer that asks for new keys this often. Python's ``ssl`` can't make them; OpenSSL's C API can."""
    with open("/proc/self/maps") as maps:
        paths = [line.split()[-1] for line in maps if "libssl" in line]
    if not paths:
        pytest.skip("OpenSSL is not a library of its own here")
    openssl = ctypes.CDLL(paths[0])
    # In all CPythons so far, the connection follows the object header and one pointer.
    connection = ctypes.c_void_p.from_address(id(tls._tls._sslobj) + 24)
    for _ in range(count):
        if openssl.SSL_key_update(connection, 1) != 1:
            pytest.skip("this OpenSSL, or this Python, is not what it seems")
        openssl.SSL_do_handshake(connection)
    return bytes(tls._outgoing.read())


def test_unauthenticated_peer_that_keeps_requesting_key_updates_is_dropped() -> None:
    """A TLS handshake needs no secret, and each one costs the worker time and memory."""
    with cluster(2, {"FARPROP_TRANSPORT": "tcp"}) as job:
        with socket.create_connection(job.run(0, own_entry).tcp) as sock:
            sock.settimeout(20)
            tls = Certificates(None).dial(sock)
            is_made, to_send = tls.handshake(b"")
            while not is_made:
                sock.sendall(to_send)
                is_made, to_send = tls.handshake(sock.recv(1 << 16))
            try:
                sock.sendall(to_send + _key_updates(tls, 20_000))
            except ConnectionError:
                pass
            assert hangs_up(sock)
        assert job.run(0, _pending_handshakes) == 0
        assert job.run(1, rpc.rpc_sync, "worker0", f.add, (1,)) == 2
