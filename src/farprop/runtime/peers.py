"""The connections that this worker has dialled: one to each worker that it calls, made when it is first needed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from farprop.config import Settings
from farprop.errors import AuthenticationError, ConnectionLostError, ProtocolError, UsageError, not_run
from farprop.ids import WorkerInfo
from farprop.locks import make_lock
from farprop.protocol.roster import Identity
from farprop.runtime.call_records import CallRecord
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.dialer import Dialer, UnresponsiveError, WrongPeerError
from farprop.runtime.first_failure import explained
from farprop.runtime.future_call import FutureCall, timeout_error
from farprop.runtime.membership import Membership
from farprop.runtime.recorder import recorder
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.self_connection import Loopback, SelfConnection
from farprop.runtime.thread_pool import ThreadPool
from farprop.transport.connection import Connection
from farprop.transport.fault_injection import FaultDecision, FaultPolicy, FaultyConnection
from farprop.transport.tls import Stream
from farprop.wire.message import SYSTEM, Message, Method

_log = logging.getLogger(__name__)

_DIAL_SECONDS = 20.0
_now = time.monotonic
NewConnection = Callable[[Stream, Identity, Callable[[Connection], None]], Connection]


class Peers:
    """Methods may be called from any thread. ``on_lost`` is called with each connection that was in use and is lost.
    The agent sets ``accept_own``, which takes the requests of this worker to itself.
    """

    def __init__(
        self,
        threads: ThreadPool,
        own: WorkerInfo,
        membership: Membership,
        dialer: Dialer,
        references: RRefContext,
        new_connection: NewConnection,
        on_lost: Callable[[ClientConnection], None],
        settings: Settings,
    ) -> None:
        self.connections: dict[str, ClientConnection] = {}  # by the worker's name
        self.by_rank: dict[int, ClientConnection] = {}  # the same connections, by rank
        self.probed: dict[int, str] = {}  # by rank, the instance that was last probed
        self.accept_own: Callable[[Loopback, Message], None]
        self._threads = threads
        self._own = own
        self._membership = membership
        self._dialer = dialer
        self._references = references
        self._new_connection = new_connection
        self._report_lost = on_lost
        self._settings = settings
        self._lock = make_lock("peers")
        self._closed = False
        self._failure = ""  # why this process is about to end
        self._fault_policy: FaultPolicy | None = None
        self._sent_before = 0  # requests sent on connections that are gone

    # Finding and dialling

    def connect(self, to: str | int | WorkerInfo, timeout: float | None = None) -> ClientConnection:
        """The connection to a worker, dialled if there is none.

        Args:
            to: the worker's name, rank or info.
            timeout: seconds that dialling may take; None for the default limit.

        Raises:
            ConnectionLostError: the worker has died or can't be reached.
            RpcTimeoutError: the time was not enough.
            UsageError: there is no such worker, or this one has shut down.
        """
        connection = self.connections.get(to) if type(to) is str else self.by_rank.get(to) if type(to) is int else None
        if connection is None or connection.lost:
            name = to.name if isinstance(to, WorkerInfo) else self._membership.info(to).name
            connection = self.connections.get(name)
            if connection is not None and connection.lost:
                self._on_lost(connection, "losing it was interrupted")  # Ctrl-C inside ``ClientConnection.lose``
                connection = None
            connection = connection or self._dial(name, timeout)
        return connection

    def name_and_rank(self, to: str | int | WorkerInfo) -> tuple[str, int]:
        """The name and rank of a worker, without dialling it."""
        connection = self.connections.get(to) if type(to) is str else None
        if connection is not None:
            return connection.peer, connection.rank
        info = to if isinstance(to, WorkerInfo) else self._membership.info(to)
        return info.name, info.id

    def name_of(self, rank: int) -> str:
        """The name of a worker that may have left; a placeholder if it is not known any more."""
        return self._membership.name_of(rank)

    def _dial(self, name: str, timeout: float | None) -> ClientConnection:
        # Threads that dial at the same time each make a connection, and the first one is kept: no thread waits.
        began = time.monotonic()
        seconds = _DIAL_SECONDS if timeout is None else min(_DIAL_SECONDS, timeout)
        with self._threads.blocked():
            try:
                return self._dial_now(name, began + seconds)
            except ConnectionLostError as error:
                if timeout is not None and time.monotonic() - began >= timeout:
                    raise not_run(timeout_error(name, timeout)) from error
                explained(not_run(error))
                error.worker = name
                raise

    def _dial_now(self, name: str, deadline: float) -> ClientConnection:
        if self._closed or self._failure:
            raise self._closed_error(name)
        entry = self._membership.find(name)
        instances = self._references.instances
        if entry is not None and (
            instances.get(entry.rank) not in (None, entry.instance) or instances.is_dead(entry.rank, entry.instance)
        ):
            self._membership.refresh()  # another process may have taken its name
            entry = self._membership.find(name)
        if entry is None:
            raise UsageError(f"{self._own.name} could not find destination {name!r}.")
        if instances.is_dead(entry.rank, entry.instance):
            raise ConnectionLostError(f"{name} ({entry.host}, pid {entry.pid}) has died.")
        if entry.rank == self._own.id:
            return self._connect_to_self()
        _log.debug("%s: dialling %s (rank %d)", self._own.label, name, entry.rank)
        client = ClientConnection(
            self._threads, self._own.label, name, entry.rank, self._on_lost, self._references.take_refs, self._settings
        )
        try:
            stream = self._dialer.dial(entry, deadline)
        except (ConnectionLostError, AuthenticationError, ProtocolError):
            if self._membership.is_static:
                raise
            self._membership.refresh()
            newer = self._membership.find(name)
            if newer is None or newer.instance == entry.instance:
                raise
            return self._dial_now(name, deadline)  # another process has joined under its name
        connection: Connection | None = None
        try:
            instances.meet(entry.rank, entry.instance)
            client.instance = entry.instance
            connection = self._new_connection(stream, entry.identity, client.want_output)
            try:
                connection.open_fd_channel()
            except OSError as error:
                raise ConnectionLostError(f"Can't talk to {name} ({entry.host}, pid {entry.pid}): {error}.") from error
            client.attach(connection)
        except BaseException:
            # Ctrl-C, too: an open connection that nobody knows must not stay.
            if connection is not None:
                self._threads.loop.remove(connection.fd)
                connection.close()
            stream.close()
            raise
        if self._fault_policy is not None:
            client.wrap(self._make_faulty)
        kept = self._keep(client)
        if kept is not client:
            client.lose("another connection was faster")
        if kept is None:
            raise self._closed_error(client.peer)
        return kept

    def _closed_error(self, name: str) -> Exception:
        if self._failure:
            return ConnectionLostError(f"Can't call {name}: {self._failure}")
        return UsageError("RPC has been shut down on this worker.")

    def _connect_to_self(self) -> ClientConnection:
        own = self._own
        client = SelfConnection(
            self._threads, own.label, own.name, own.id, self._on_lost, self._references.take_refs, self._settings
        )
        client.open(self.accept_own)
        if self._fault_policy is not None:
            client.wrap(self._make_faulty)
        kept = self._keep(client)
        if kept is None:
            raise self._closed_error(client.peer)
        return kept

    def _keep(self, client: ClientConnection) -> ClientConnection | None:
        """Register a new connection.

        Returns:
            The connection to use: this one, or one that another thread has dialled meanwhile; None after ``close``.
        """
        with self._lock:
            if self._closed or self._failure:
                return None
            kept = self.connections.setdefault(client.peer, client)
            if kept is client:
                self.by_rank[client.rank] = client
            return kept

    def _on_lost(self, client: ClientConnection, reason: str) -> None:
        _log.info("%s: lost the connection to %s: %s", self._own.label, client.peer, reason)
        with self._lock:
            was_used = self.connections.get(client.peer) is client
            if was_used:
                del self.connections[client.peer]
                self._sent_before += client.sent
                if self.by_rank.get(client.rank) is client:
                    del self.by_rank[client.rank]
        self._references.route_lost(client, client.rank)
        if was_used and not self._closed:
            self._report_lost(client)

    def probe(self, rank: int, timeout: float | None = None) -> None:
        """Dial a worker, unless there is a connection.

        Raises:
            UnresponsiveError: this worker does not know the others yet.
            WrongPeerError: the worker is surely gone.
            ConnectionLostError: it can't be reached.
        """
        if self._closed:
            raise UsageError("RPC has been shut down on this worker.")
        if not self._membership.joined.is_set():
            raise UnresponsiveError("this worker is still joining the group, and does not know its address")
        known = self._references.instances.get(rank)
        if known is not None:
            self.probed[rank] = known
        self._membership.refresh()
        entry = self._membership.find(rank)
        if known is None and entry is not None:
            self.probed[rank] = entry.instance
        if entry is None or (known is not None and entry.instance != known):
            raise WrongPeerError(f"{self._membership.name_of(rank)} has left the group")
        self.connect(entry.name, timeout)

    # Farprop's own methods

    def send_method(self, rank: int, method: Method, message: Message, call: FutureCall, system: bool) -> None:
        """Call a method on another worker; raises like any call. ``system`` if it is short and runs no user code."""
        send_method(self.connect(rank, call.timeout), method, message, call, system)

    def call_method(self, rank: int, method: Method, message: Message, timeout: float | None, system: bool) -> Message:
        """Call a method on another worker, and wait for the answer."""
        message.name = method.value
        if system:
            message.flags |= SYSTEM
        connection = self.by_rank.get(rank)
        if connection is None or connection.lost:
            connection = self.connect(rank, timeout)
        if not recorder.is_on:
            return connection.call_sync(message, timeout)
        record = message.record = CallRecord(method.name, _now(), message)
        with record:
            answer = connection.call_sync(message, timeout)
            record.on_answer(answer)
            return answer

    def is_connected(self, rank: int) -> bool:
        """Whether there is a connection to this worker that is not lost."""
        connection = self.by_rank.get(rank)
        return connection is not None and not connection.lost

    def is_ready(self, rank: int) -> bool:
        """Whether a call to this worker would be sent without dialling or waiting."""
        connection = self.by_rank.get(rank)
        return connection is not None and not connection.lost and connection.has_room

    # Faults, for tests

    def set_fault_policy(self, policy: FaultPolicy | None) -> FaultPolicy | None:
        """Apply a fault policy to every message to other workers; returns the earlier policy."""
        with self._lock:
            before, self._fault_policy = self._fault_policy, policy
            connections = list(self.connections.values()) if before is None else []
        for connection in connections:
            connection.wrap(self._make_faulty)
        return before

    def _make_faulty(self, connection: Any) -> Any:
        return connection if isinstance(connection, FaultyConnection) else FaultyConnection(connection, self._decide)

    def _decide(self, peer: str, message: Message) -> FaultDecision | None:
        policy = self._fault_policy
        return None if policy is None else policy(peer, message)

    # State

    @property
    def open_calls(self) -> int:
        return sum(connection.open_calls for connection in list(self.connections.values()))

    @property
    def open_work(self) -> int:
        """The open calls of the program, and those that belong to them; not those of gathers and of references."""
        return sum(connection.open_work for connection in list(self.connections.values()))

    @property
    def requests_sent(self) -> int:
        with self._lock:
            return self._sent_before + sum(connection.sent for connection in self.connections.values())

    @property
    def have_output(self) -> bool:
        """Whether a connection has bytes that are not sent yet."""
        return any(connection.outbox_bytes for connection in list(self.connections.values()))

    def give_back(self) -> None:
        """Return segments that no message has returned yet."""
        for connection in list(self.connections.values()):
            connection.give_back()

    def lose(self, rank: int, reason: str, unless: str = "") -> None:
        """Give up the connection to a worker, ``unless`` it is one to this instance."""
        connection = self.by_rank.get(rank)
        if connection is not None and (not unless or connection.instance != unless):
            connection.lose(reason)

    def fail_all(self, reason: str) -> None:
        """Fail all open calls and all later ones: this process is about to end."""
        with self._lock:
            self._failure = reason
            connections = list(self.connections.values())
        for connection in connections:
            connection.lose(reason)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = list(self.connections.values())
        for connection in connections:
            connection.lose("this worker shut down")

    def abandon(self) -> None:
        """In a forked child, close the descriptors without sending anything to the peers."""
        self._closed = True
        for connection in self.connections.values():
            connection.abandon()


def send_method(connection: ClientConnection, method: Method, message: Message, call: FutureCall, system: bool) -> None:
    """As ``Peers.send_method``, on a connection."""
    message.name = method.value
    if system:
        message.flags |= SYSTEM
    if recorder.is_on:
        message.record = CallRecord(method.name, _now(), message, decodes=False, waits=False)
    connection.call_async(message, call)
