"""Remote references of this worker: the state machine with the network behind it.

``guarded_machine`` has the lock and carries out instructions, ``user_references`` and ``owned_values`` are the
runtime's two sides, and ``control_sender`` sends the operations. ``RRefContext`` joins them: it has what concerns both
sides, which is messages that carry references, operations, and deaths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from farprop.errors import ConnectionLostError, ReferenceLostError
from farprop.ids import GlobalId, distinct, unguessable
from farprop.protocol.references.control_plane import Batch, OperationKind
from farprop.protocol.references.records import (
    Fork,
    InstructionKind,
    OwnedValue,
    ReturnedFork,
    User,
    UserReference,
)
from farprop.protocol.references.state_machine import RRefStateMachine
from farprop.runtime.liveness import PeerInstances
from farprop.runtime.references.control_sender import ControlSender, ControlTransport
from farprop.runtime.references.guarded_machine import GuardedMachine
from farprop.runtime.references.owned_values import OwnedValues, ValueSlot
from farprop.runtime.references.user_references import ReferenceInfo, RRefHandle, UserReferences
from farprop.wire.message import REFS, REMOTE, Creation, Message, ReceivedRefs, unpack_operations

_GIVING_UP = frozenset({OperationKind.RECALL, OperationKind.FORGO, OperationKind.DELETE})
_ID_BITS = 63


class RRefContext:
    """The references of one worker.

    ``users`` has its references to values of others, ``values`` the values that it owns, and ``instances`` knows which
    process has each rank. ``submit`` runs something on a thread of the pool. ``on_replaced`` is called with a rank and
    the instance that has taken it, when the references to the one before it are void.

    Args:
        own_rank: This worker.
        worker: Its name, for errors.
        transport: The network, the pool and the timers.
        on_context_ended: Is told when a peer says that an autograd context has ended: its id and the peer's rank.
    """

    def __init__(
        self, own_rank: int, worker: str, transport: ControlTransport, on_context_ended: Callable[[GlobalId, int], None]
    ) -> None:
        self.own_rank = own_rank
        self._worker = worker
        self._transport = transport
        self._on_context_ended = on_context_ended
        # In a restricted job only those who were given a reference to a value can name it.
        numbers = unguessable(_ID_BITS) if transport.dialect.restricted else None
        if numbers is None and not transport.is_static:
            numbers = distinct(_ID_BITS)
        self._machine = machine = RRefStateMachine(own_rank, numbers)
        self._guard = guard = GuardedMachine(machine, transport.call_at_lockfree)
        self._do = guard.run
        self.submit = transport.submit
        self.users = UserReferences(guard, transport)
        self.values = OwnedValues(guard, worker, transport)
        self._sender = ControlSender(
            transport, partial(guard.locked, machine.outgoing), partial(guard.run, machine.replied)
        )
        self.instances = PeerInstances(guard, self._replaced)
        self.on_replaced: Callable[[int, str], None] = lambda rank, instance: None
        guard.handlers.update(
            {
                InstructionKind.SEND: self._sender.send,
                InstructionKind.SEND_LATER: self._sender.send_later,
                InstructionKind.SETTLED: self.users.on_settled,
                InstructionKind.BROKEN: self.values.on_broken,
                InstructionKind.FREED: self.values.on_freed,
            }
        )
        self._closed = False

    # References of this worker's program

    def abandon(self, subject: UserReference | OwnedValue, sent: bool) -> None:
        """``remote()`` raises: the program never gets the reference. ``sent``: the call may have left."""
        if isinstance(subject, OwnedValue):
            self.values.own_call_ended(subject)
        else:
            self.users.abandon(subject, sent)

    def clean_up(self, rank: int, context: GlobalId) -> None:
        """Tell another worker that an autograd context has ended."""
        self._do(self._machine.clean_up, rank, context)

    # Messages that leave

    def attach_refs(
        self, message: Message, to: int, route: object, creation: Creation | None = None, lend: bool = False
    ) -> None:
        """Give the references that the codec met in a message their forks. Raises, and changes nothing, if one of them
        can't be used.

        Args:
            message: the message.
            to: the rank that it goes to.
            route: the connection that it is sent on.
            creation: for ``remote()``, the reference to the result.
            lend: the sender holds the references of this request until the call has ended, so they may be lent.
        """
        if message.out_of_band:
            sources = [rref._source("fork an UserRRef") for rref in message.out_of_band]
            lent = self._lend_all(sources, to) if lend else None
            message.flags |= REFS
            if lent is not None:
                message.refs = lent
            else:
                forks = [self._machine.prepare_fork(source) for source in sources]
                try:
                    self._do(self._send_all, forks, sources, to, route)
                    message.refs = forks
                except BaseException:
                    self.not_sent(forks)
                    raise
        if creation is not None:
            message.creation = creation
            message.flags |= REMOTE

    def _lend_all(self, sources: Sequence[UserReference | OwnedValue], to: int) -> list[Fork] | None:
        """Without the lock: it changes nothing, and a reference that the program holds stays confirmed."""
        forks: list[Fork] = []
        for source in sources:
            fork = self._machine.lend(source, to)
            if fork is None:
                return None
            forks.append(fork)
        return forks

    def _send_all(
        self, forks: Sequence[Fork], sources: Sequence[UserReference | OwnedValue], to: int, route: object
    ) -> None:
        for fork, source in zip(forks, sources, strict=True):
            self._machine.send_fork(fork, source, to, route)

    def not_sent(self, forks: Sequence[Fork]) -> None:
        """A message with these forks was never sent."""
        if forks:
            self._do(self._machine.undelivered, forks)

    def doubted(self, forks: Sequence[Fork]) -> None:
        """A message with these forks may have been sent or not: ask the receiver."""
        if forks:
            self._do(self._machine.doubted, forks)

    def route_lost(self, route: object, peer: int) -> None:
        """A connection closed: ask which forks on it have arrived, and find out whether the worker lives."""
        if not self._closed and self.concerned_with(peer):
            self._do(self._machine.route_lost, route)
            self._transport.suspect(peer)

    # Messages that arrive

    def take_refs(self, sender: int, message: Message) -> None:
        """Take the references of an answer, and those that it gives back."""
        if message.returned:
            try:
                self._do(self._machine.returned, sender, message.returned)
            except BaseException:
                self._guard.run_later(self._machine.returned, sender, message.returned)
                raise
        if message.flags & REFS:
            message.received_refs = ReceivedRefs(None, self._take(sender, message.refs, borrow=False))

    def borrow_refs(self, sender: int, message: Message) -> None:
        """Take the references of a request. ``end_borrowing`` follows before it is answered."""
        creation: OwnedValue | None = None
        if message.creation is not None:
            fork, site = message.creation
            creation = self._do(self.values.make, sender, fork, message.name, site)
        lent = self._find_lent(sender, message.refs)
        if lent is not None:
            message.received_refs = ReceivedRefs(creation, lent)
            return
        items = self._take(sender, message.refs, borrow=True)
        borrowed = [i.record for i in items if isinstance(i, RRefHandle) and i.record.state is User.BORROWED]
        message.received_refs = ReceivedRefs(creation, items, borrowed)

    def _find_lent(self, sender: int, forks: Sequence[Fork]) -> list[RRefHandle | OwnedValue] | None:
        """The values of references that were all lent to this worker, their owner; else None. Without the lock: most
        calls through references are of this kind, and it changes nothing.
        """
        found: list[RRefHandle | OwnedValue] = []
        for fork in forks:
            value = self._machine.find_lent(fork, sender)
            if value is None or not hasattr(value, "slot"):
                return None
            found.append(value)
        return found

    def _take(self, sender: int, forks: Sequence[Fork], borrow: bool) -> list[RRefHandle | OwnedValue]:
        if not forks:
            return []
        try:
            return [self._kept(record) for record in self._do(self._arrive_all, forks, sender, borrow)]
        except BaseException:
            self._guard.run_later(self._machine.give_up, forks)
            raise

    def _arrive_all(self, forks: Sequence[Fork], sender: int, borrow: bool) -> list[UserReference | OwnedValue]:
        records = [self._machine.arrive(fork, sender, borrow) for fork in forks]
        for record in records:
            if isinstance(record, UserReference):
                record.info = ReferenceInfo()
            else:
                self.values.slot(record)
        return records

    def _kept(self, record: UserReference | OwnedValue) -> RRefHandle | OwnedValue:
        if isinstance(record, OwnedValue):
            return record
        return self.users.borrow(record) if record.state is User.BORROWED else self.users.hold(record)

    def not_returned(self, to: int, forks: Sequence[ReturnedFork]) -> None:
        """No answer carries these forks back to their sender. Also if one may have: to give them back twice does no
        harm."""
        if forks:
            self._do(self._machine.not_returned, to, forks)

    # Operations

    def operate(self, peer: int, instance: str, number: int, operations: bytes) -> bytes:
        """A batch came from another worker."""
        batch = Batch(number, unpack_operations(operations))
        given_up = [operation.rref for operation in batch.operations if operation.kind in _GIVING_UP]

        def take() -> tuple[bytes, list[tuple[GlobalId, ValueSlot]]]:
            if peer in self._machine.dead or self.instances.get(peer, instance) != instance:
                raise ConnectionLostError(f"{self._worker} has taken this worker for dead.")
            results = self._machine.incoming(peer, batch).results
            return results, self.values.give_up(given_up)

        results, broken = self._do(take)
        self.values.fail_given_up(broken)
        for operation in batch.operations:
            if operation.kind is OperationKind.CLEANUP:  # to end a context twice does no harm
                self._on_context_ended(operation.rref, peer)
        return results

    # Deaths

    def concerned_with(self, rank: int) -> bool:
        """Whether the death of a worker would change anything here."""
        return self._guard.locked(self._machine.concerns, rank)

    def is_dead(self, rank: int) -> bool:
        """Whether a worker is known to be dead, and no other process has its rank."""
        return rank in self._machine.dead

    def died(self, rank: int, instance: str | None = None) -> bool:
        """A worker is dead: void references to its values, and give back its own.

        Args:
            rank: Its rank.
            instance: The instance that is dead; None if it is not known.

        Returns:
            Whether it is; False if another instance has its rank by now.
        """
        lost = self._do(self._die, rank, instance)
        if lost is None:
            return False
        self._sender.forget(rank)
        self._fail(lost, rank)
        return True

    def _die(self, rank: int, instance: str | None) -> list[ValueSlot] | None:
        if instance is not None and not self.instances.note(rank, instance):
            return None
        self._machine.died(rank)
        return self.values.take_early_slots_of(rank)

    def _replaced(self, rank: int, instance: str) -> None:
        """Another instance has a rank: the one before it is dead."""
        lost = self._do(self._replace, rank, instance)
        if lost is not None:
            self._sender.forget(rank)
            self._sender.go_on(rank)  # with what there is for the new one
            self._fail(lost, rank)
            self.on_replaced(rank, instance)

    def _replace(self, rank: int, instance: str) -> list[ValueSlot] | None:
        if self.instances.get(rank) == instance or self.instances.is_dead(rank, instance):
            return None  # another thread has met it, too, or it has been replaced itself
        self.users.owner_replaced(rank)
        lost = self._die(rank, None)
        self.instances.replace(rank, instance)
        return lost

    def _fail(self, slots: list[ValueSlot], rank: int) -> None:
        for slot in slots:
            slot.fail(ReferenceLostError(f"{self._transport.name_of_rank(rank)} died before it made the value."))

    # Inspection

    @property
    def settled(self) -> bool:
        """Nothing is on its way to another worker, and nothing is left to do."""
        self.users.drop_forgotten()
        # It also carries out what an interrupted thread has left.
        return self._do(
            lambda: self.users.none_queued and self._guard.idle and self.values.all_released and self._machine.settled
        )

    def counts(self) -> dict[str, int]:
        """How many values, references, forks and operations there are."""
        return {**self._guard.locked(self._machine.counts), "num_pending_futures": self._sender.under_way}

    def snapshot(self) -> tuple[list[UserReference], list[tuple[OwnedValue, list[int]]]]:
        """The references to values of others, and the values that others refer to, with the ranks of those."""
        users, owned = self._machine.users, self._machine.owned
        return self._guard.locked(
            lambda: (list(users.values()), [(value, list(value.forks.values())) for value in owned.values()])
        )

    def close(self) -> None:
        """Send nothing any more."""
        self._closed = True
        self._sender.close()
