"""Accepted connections of a worker that closes meanwhile, on another thread."""

from __future__ import annotations

import socket
import threading
from typing import Any
from unittest.mock import Mock

from farprop.ids import WorkerInfo
from farprop.runtime.accepted_connections import AcceptedConnections
from farprop.runtime.acceptor import Acceptor
from farprop.runtime.event_loop import EventLoop


class Interleaved(dict[int, Any]):
    """Between a look-up and what follows it, another thread runs, as far as it can."""

    def __init__(self, meanwhile: Any) -> None:
        super().__init__()
        self.thread = threading.Thread(target=meanwhile)

    def get(self, key: int, default: Any = None) -> Any:
        found = super().get(key, default)
        self.thread.start()
        self.thread.join(0.2)  # a thread that waits for the lock does not end
        return found


def test_worker_that_closes_while_a_peer_hangs_up() -> None:
    loop, unused = EventLoop(), Mock()
    accepted = AcceptedConnections(loop, WorkerInfo("w0", 0), unused, unused, unused, unused, unused)
    accepted.on_closed = unused
    table = accepted._connections = Interleaved(accepted.close)
    connection = Mock(fd=1000)
    table[connection.fd] = connection
    accepted.close_one(connection)
    table.thread.join()
    assert not table
    assert connection.close.called
    loop.close()


def test_worker_that_closes_while_a_peer_is_admitted() -> None:
    """The connection of the peer does not stay open."""
    loop, unused, connection = EventLoop(), Mock(), Mock(fd=1000)

    def new_connection(*_: Any) -> Any:
        accepted.close()
        return connection

    accepted = AcceptedConnections(loop, WorkerInfo("w0", 0), unused, new_connection, unused, unused, unused)
    accepted.on_events = accepted.on_closed = unused
    ours, theirs = socket.socketpair()
    with ours, theirs:
        accepted._add(ours, Mock())
    assert connection.close.called
    assert not accepted.all()
    loop.close()


def test_worker_that_closes_while_it_accepts_a_connection() -> None:
    loop, unused = EventLoop(), Mock()

    def accepted(_: socket.socket) -> Any:
        acceptor.close()
        return Mock(), None

    acceptor = Acceptor(loop, "w0", accepted, unused, unused)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    acceptor.listen(listener)
    with socket.create_connection(listener.getsockname(), timeout=30) as peer:
        loop.poll(30)
        assert peer.recv(1) == b""
    loop.close()
