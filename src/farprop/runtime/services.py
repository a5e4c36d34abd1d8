"""The services of a worker that its references and backward passes use."""

from __future__ import annotations

import threading
from collections.abc import Callable

from farprop.protocol.references.control_plane import Batch
from farprop.runtime.autograd.contexts import global_id_of
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.future_call import FutureCall
from farprop.runtime.membership import Membership
from farprop.runtime.peers import Peers, send_method
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.thread_pool import ThreadPool
from farprop.wire.dialect import Dialect
from farprop.wire.message import Method, pack_operations


class WorkerServices:
    """Implements ``ControlTransport`` and ``PeerCaller``. ``bind`` is called before it is used."""

    def __init__(
        self,
        threads: ThreadPool,
        membership: Membership,
        instance: str,
        dialect: Dialect,
        rpc_timeout: float | None,
        suspect: Callable[[int], None],
    ) -> None:
        self.label = membership.own.label
        self.dialect = dialect
        self.is_static = membership.is_static
        self.rpc_timeout = rpc_timeout
        self.suspect = suspect
        self.submit = threads.submit
        self.blocked = threads.blocked
        self.call_at = threads.loop.call_at
        self.call_at_lockfree = threads.loop.call_at_lockfree
        self._serving = threads.serving
        self._membership = membership
        self._instance = instance

    def bind(self, peers: Peers, references: RRefContext) -> None:
        """Set the parts whose constructors need this object."""
        self._references = references
        self.connect = peers.connect
        self.is_connected = peers.is_connected
        self.is_ready = peers.is_ready
        self.send_method = peers.send_method
        self.call_method = peers.call_method

    # The workers of the job

    def name_of_rank(self, rank: int) -> str:
        return self._membership.name_of(rank)

    def is_dead(self, rank: int) -> bool:
        entry = self._membership.find(rank)
        return self._references.is_dead(rank) and (
            entry is None or self._references.instances.is_dead(rank, entry.instance)
        )

    def ranks(self) -> list[int]:
        return [info.id for info in self._membership.infos()]

    def is_caller_gone(self) -> bool:
        """Whether the connection is closed that the request came on which this thread runs."""
        return bool(self._serving[threading.get_ident()].connection.closed)

    # Calls of farprop's own

    def send_batch(self, connection: ClientConnection, batch: Batch, call: FutureCall) -> None:
        args = (self._instance, batch.number, pack_operations(batch.operations))
        message = self.dialect.encode_call(None, args, {})
        message.keep = batch  # fault plans read it
        send_method(connection, Method.CONTROL, message, call, system=True)

    def clean_up(self, rank: int, context_id: int) -> None:
        """Have another worker release an autograd context, with the next control batch."""
        self._references.clean_up(rank, global_id_of(context_id))
