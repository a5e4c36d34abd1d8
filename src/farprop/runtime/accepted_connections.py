"""The connections that other workers have dialled. Those that this worker has dialled are in ``peers``."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import partial
from weakref import WeakKeyDictionary

from farprop.errors import AuthenticationError, ConnectionLostError
from farprop.ids import WorkerInfo
from farprop.locks import make_lock
from farprop.protocol.handshake import ListenerHandshake
from farprop.protocol.roster import Identity
from farprop.runtime.acceptor import Acceptor
from farprop.runtime.event_loop import HANGUP, IN, OUT, EventLoop
from farprop.transport.connection import Connection
from farprop.transport.sockets import make_ready
from farprop.transport.tls import Stream, TlsSocket

_log = logging.getLogger(__name__)


class AcceptedConnections:
    """The table of these connections: who gets into it, and how they end.

    The server sets ``on_events``, which is called with a connection and the events on it, and ``on_closed``, which is
    called with each connection that was closed.

    Args:
        loop: watches the connections.
        own: this worker.
        accepted: returns the handshake for a new connection, and its TLS if it has any.
        new_connection: makes a connection of an authenticated socket.
        check_peer: called with the identity of an authenticated peer; returns it parsed, or raises to refuse the peer.
        check_membership: raises if a process is not a member of the job.
        on_lost: called with each connection that was lost.
    """

    def __init__(
        self,
        loop: EventLoop,
        own: WorkerInfo,
        accepted: Callable[[socket.socket], tuple[ListenerHandshake, TlsSocket | None]],
        new_connection: Callable[[Stream, Identity, Callable[[Connection], None]], Connection],
        check_peer: Callable[[bytes], Identity],
        check_membership: Callable[[Identity], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        self.on_events: Callable[[Connection, int], None]
        self.on_closed: Callable[[Connection], object]
        self._loop = loop
        self._label = own.label
        self._acceptor = Acceptor(loop, own.name, accepted, check_peer, self._add)
        self._new_connection = new_connection
        self._check_membership = check_membership
        self._on_lost = on_lost
        self._lock = make_lock("accepted_connections")
        self._connections: dict[int, Connection] = {}  # by descriptor
        self._identities: WeakKeyDictionary[Connection, Identity] = WeakKeyDictionary()
        self._closed = False

    def all(self) -> list[Connection]:
        return list(self._connections.values())

    def listen(self, listener: socket.socket) -> None:
        """Accept connections on this socket."""
        self._acceptor.listen(listener)

    def _add(self, sock: Stream, peer: Identity) -> None:
        try:
            make_ready(sock)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            _log.warning("%s: refused a connection: %s", self._label, error)
            sock.close()
            return
        connection = self._new_connection(sock, peer, self.want_output)
        with self._lock:
            is_closed = self._closed
            if not is_closed:
                self._connections[connection.fd] = connection
        if is_closed:  # meanwhile, by another thread
            connection.close()
            return
        self._identities[connection] = peer
        self._loop.add(connection.fd, IN | HANGUP, partial(self.on_events, connection))
        self._close_if_stranger(connection)  # this worker may have joined meanwhile

    def close_strangers(self) -> None:
        """The members are known now: close earlier connections of processes that are not members."""
        for connection in self.all():
            self._close_if_stranger(connection)

    def _close_if_stranger(self, connection: Connection) -> None:
        identity = self._identities.get(connection)
        try:
            if identity is not None:
                self._check_membership(identity)
        except AuthenticationError as error:
            _log.warning("%s: closed a connection: %s", self._label, error)
            self.close_one(connection)

    def want_output(self, connection: Connection) -> None:
        """Watch for writability, too."""
        self._loop.change(connection.fd, IN | HANGUP | OUT)

    def close_one(self, connection: Connection) -> None:
        """Close a connection. A second time does no harm."""
        with self._lock:
            # By identity: another thread may have closed it, and another connection may have its descriptor by now.
            if self._connections.get(connection.fd) is not connection:
                return
            del self._connections[connection.fd]
        self._loop.remove(connection.fd)
        if connection.close():
            self._on_lost(connection)
        self.on_closed(connection)

    def report_lost(self, connection: Connection) -> None:
        """Report a connection that was lost while a request from it ran."""
        self._on_lost(connection)

    def close_those_of(self, rank: int, unless: str = "") -> None:
        """Close all connections of a worker, ``unless`` they are those of this instance."""
        for connection in self.all():
            identity = self._identities.get(connection)
            if connection.rank == rank and (not unless or identity is None or identity.instance != unless):
                self.close_one(connection)

    @property
    def have_output(self) -> bool:
        """Whether a connection has bytes that are not sent yet."""
        return any(connection.outbox_bytes for connection in self.all())

    def give_back(self) -> None:
        """Return segments that no message has returned yet."""
        for connection in self.all():
            try:
                connection.give_back()
            except ConnectionLostError:
                pass  # the loop sees the end of it

    def close(self) -> None:
        """Accept nothing any more, and close all connections."""
        self._acceptor.close()
        with self._lock:
            # Emptied under the lock: the loop may be about to close one of them, or to add another.
            self._closed = True
            connections = list(self._connections.values())
            self._connections.clear()
        for connection in connections:
            self._loop.remove(connection.fd)
            connection.close()

    def abandon(self) -> None:
        """In a forked child, close the descriptors without sending anything to the peers."""
        self._acceptor.abandon()
        for connection in self._connections.values():
            connection.abandon()
