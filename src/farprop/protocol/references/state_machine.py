"""The protocol of remote references, as one worker runs it: distributed garbage collection by *reference listing*.

The owner of a value keeps a list of its forks, one for each reference on another worker, and frees the value when the
list is empty. Adding or removing a fork twice changes nothing, so messages may be repeated. Rules that hold here:

- A value is not freed while a reference to it can be reached on any worker that is alive.
- A reference that is passed on is held by its parent until the owner lists the child.
- No order of messages is assumed. Operations are executed exactly once (``control_plane``).
- When a worker dies, the forks it held are removed, the values it owned are lost, and nothing waits for it.

Not thread-safe: the caller holds a lock. Every method may append to ``instructions``, which the caller carries out in
order and empties.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from farprop.ids import GlobalId
from farprop.protocol.references.control_plane import Batch, ControlPlane, ControlReply, Operation, OperationKind
from farprop.protocol.references.forks_in_transit import ForksInTransit
from farprop.protocol.references.owner_side import OwnerSide
from farprop.protocol.references.records import (
    Fork,
    Instruction,
    OwnedValue,
    PassedFork,
    ReturnedFork,
    UserReference,
)
from farprop.protocol.references.user_side import UserSide


class RRefStateMachine:
    """Events in, instructions out. See the module's rules.

    Args:
        own_rank: This worker.
        numbers: The local parts of new ids; counted from 0 by default.
    """

    def __init__(self, own_rank: int, numbers: Iterator[int] | None = None) -> None:
        self.own_rank = own_rank
        self._plane = ControlPlane(own_rank, numbers, self._execute, self._on_result)
        self._users = UserSide(self._plane)
        self._owner = OwnerSide(self._plane)
        self._transit = ForksInTransit(self._plane, self._users, self._owner)
        # The parts' own tables, to look at.
        self.instructions: list[Instruction] = self._plane.instructions
        self.dead: set[int] = self._plane.dead
        self.users: dict[GlobalId, UserReference] = self._users.references
        self.owned: dict[GlobalId, OwnedValue] = self._owner.values
        self.passed: dict[GlobalId, PassedFork] = self._transit.passed

    def new_id(self) -> GlobalId:
        """An id that no other value, fork or context has."""
        return self._plane.new_id()

    # The program of this worker

    def create(self, owner: int) -> UserReference:
        """``remote()`` is about to call ``owner``, another worker: the reference to what the call will make."""
        reference = self._users.prepare(owner)
        self._users.add(reference)
        return reference

    def prepare_reference(self, owner: int) -> UserReference:
        """A reference for ``add_reference``. This changes nothing, and needs no lock."""
        return self._users.prepare(owner)

    def add_reference(self, reference: UserReference) -> None:
        """As ``create``, for one that was prepared, so that the caller has it even if this is interrupted."""
        self._users.add(reference)

    def made(self, reference: UserReference) -> None:
        """The owner has answered the call that makes the value."""
        self._users.made(reference)

    def unanswered(self, reference: UserReference, lost: bool) -> None:
        """The call that makes the value gets no answer.

        Args:
            reference: What ``create`` returned.
            lost: The call itself may be lost. Otherwise it will arrive, or has.
        """
        self._users.unanswered(reference, lost)

    def unsent(self, reference: UserReference) -> None:
        """The call that makes the value was never sent."""
        self._users.unsent(reference)

    def drop(self, reference: UserReference) -> None:
        """The program can't reach this reference any more."""
        self._users.drop(reference)

    def fork(self, source: UserReference | OwnedValue, to: int, route: object) -> Fork:
        """A reference is about to be sent to a worker.

        Args:
            source: The reference, or the value of this worker.
            to: The receiver.
            route: The connection; ``route_lost`` names it if it breaks.
        """
        return self._transit.fork(source, to, route)

    def prepare_fork(self, source: UserReference | OwnedValue) -> Fork:
        """A fork for ``send_fork``. This changes nothing, and needs no lock."""
        return self._transit.prepare(source)

    def send_fork(self, fork: Fork, source: UserReference | OwnedValue, to: int, route: object) -> None:
        """As ``fork``, for one that was prepared. ``undelivered`` takes it back, even if this was interrupted."""
        self._transit.send(fork, source, to, route)

    def lend(self, source: UserReference | OwnedValue, to: int) -> Fork | None:
        """A reference is about to be sent in a request. The caller holds it until the call has ended.

        Returns:
            What to send if ``to`` is the owner and lists the reference; else None, and the caller calls ``fork``.
        """
        return self._transit.lend(source, to)

    def own(self) -> OwnedValue:
        """A record for a value of this worker that no other worker refers to yet. Needs no lock."""
        return self._owner.own()

    def clean_up(self, peer: int, context: GlobalId) -> None:
        """Tell another worker that an autograd context has ended.

        Contexts have nothing to do with references; they use this channel because it delivers exactly once.
        """
        self._plane.post(peer, Operation(OperationKind.CLEANUP, context, context))

    # References in calls and answers

    def make(self, creator: int, rref: GlobalId, fork: GlobalId) -> OwnedValue | None:
        """A call arrived that makes a value here.

        Returns:
            The value; None if the call must not run, because its creator has given it up as lost or is dead.
        """
        return self._owner.make(creator, rref, fork)

    def arrive(self, fork: Fork, sender: int, borrow: bool = False) -> UserReference | OwnedValue:
        """A reference arrived in a message.

        Args:
            fork: The reference.
            sender: The worker that sent the message.
            borrow: It is a request, and the caller of this says when it is answered: by ``keep``, ``give_back`` or
                ``drop``.

        Returns:
            The reference, in state VOID if it is unusable; or the value, if it is one of this worker.
        """
        return self._transit.arrive(fork, sender, borrow)

    def find_lent(self, fork: Fork, sender: int) -> OwnedValue | None:
        """As ``arrive``, for a fork that was lent to this worker. This changes nothing, and needs no lock.

        Returns:
            The value, if it is made and lists the sender's fork; else None, and the caller calls ``arrive``.
        """
        return self._owner.find_lent(fork, sender) if fork.lent else None

    def keep(self, reference: UserReference) -> None:
        """The program has a reference that it borrowed for longer than the call. To do this twice does no harm."""
        self._users.keep(reference)

    def give_back(self, reference: UserReference) -> ReturnedFork | None:
        """The program has dropped a reference that it borrowed, and an answer is about to be sent to its sender.

        Returns:
            What the answer carries; None if it can't, and the caller calls ``drop``.
        """
        return self._users.give_back(reference)

    def returned(self, peer: int, forks: Sequence[ReturnedFork]) -> None:
        """A worker has answered a request, and gives back these forks."""
        for fork, orphans in forks:
            self._transit.on_returned(peer, fork, orphans)

    def not_returned(self, peer: int, forks: Sequence[ReturnedFork]) -> None:
        """The answer that carried these forks back was not sent, or may not have been: tell their sender otherwise."""
        for fork, orphans in forks:
            self._plane.post(peer, Operation(OperationKind.RETURN, fork, fork, orphans))

    def give_up(self, forks: Sequence[Fork]) -> None:
        """Taking these forks out of a message was interrupted: drop those that have arrived."""
        for fork in forks:
            self._users.give_up(fork.fork)

    def find(self, rref: GlobalId) -> OwnedValue | None:
        """The value of this worker with this id, if another worker refers to it."""
        return self._owner.values.get(rref)

    def may_come(self, rref: GlobalId) -> bool:
        """Whether the call that makes a value that is not here may still arrive."""
        return self._owner.may_come(rref)

    # The network

    def route_lost(self, route: object) -> None:
        """A connection broke, and the peer is alive: ask it which forks on that connection have arrived."""
        self._transit.route_lost(route)

    def doubted(self, forks: Sequence[Fork]) -> None:
        """These forks may have been sent or not: ask the receiver whether they have arrived."""
        self._transit.doubted(forks)

    def undelivered(self, forks: Sequence[Fork]) -> None:
        """These forks were never sent."""
        self._transit.undelivered(forks)

    def outgoing(self, peer: int) -> Batch | None:
        """The batch to send to a worker, or to send again; None if there is none."""
        return self._plane.outgoing(peer)

    def incoming(self, peer: int, batch: Batch) -> ControlReply:
        """A batch arrived: execute it, unless it is a duplicate. Returns the reply to send."""
        return self._plane.incoming(peer, batch)

    def replied(self, peer: int, reply: ControlReply) -> None:
        """A reply arrived. An old one is ignored."""
        self._plane.replied(peer, reply)

    def died(self, peer: int) -> None:
        """A worker is dead. The caller takes nothing more that it sent."""
        if peer in self.dead:
            return
        self._plane.on_death(peer)
        self._transit.forget_ids_of(peer)
        self._owner.forget_ids_of(peer)
        self._users.on_death(peer)
        self._transit.on_death(peer)
        self._owner.on_death(peer)

    def replaced(self, peer: int) -> None:
        """A new process has taken the rank of a dead one."""
        self.dead.discard(peer)
        self._users.owner_replaced(peer)

    def _execute(self, peer: int, operation: Operation) -> bool:
        """Execute an operation that a peer asks for. Returns whether there was something to do it on."""
        kind, rref, fork, flag = operation
        if kind is OperationKind.REGISTER:
            return self._owner.register(peer, rref, fork, exists=flag)
        if kind is OperationKind.REVOKE:
            return self._transit.revoke(rref, fork)
        if kind is OperationKind.RECALL:
            return self._owner.recall(rref, fork)
        if kind is OperationKind.ACCEPT:
            self._transit.on_accept(fork, orphans=flag)
        elif kind is OperationKind.RETURN:
            self._transit.on_returned(peer, fork, orphans=flag)
        elif kind is OperationKind.DELETE:
            self._owner.delete(rref, fork, orphans=flag)
        elif kind is OperationKind.FORGO:
            self._owner.forgo(rref, fork, orphans=flag)
        return True  # CLEANUP is the caller's business

    def _on_result(self, operation: Operation, done: bool) -> None:
        """A peer has executed an operation of this worker."""
        if operation.kind is OperationKind.REGISTER:
            self._users.on_registered(operation.fork, done)
        elif operation.kind is OperationKind.REVOKE and not done:
            self._transit.on_never_came(operation.fork)
        elif operation.kind is OperationKind.RECALL and not done:
            self._users.on_never_came(operation.fork)

    # Inspection

    @property
    def settled(self) -> bool:
        """Nothing is on its way or in doubt: the state stays as it is until somebody does something."""
        return self._plane.idle and not self.passed and not self._users.num_unconfirmed

    def concerns(self, peer: int) -> bool:
        """Whether the death of a worker would change anything here."""
        return (
            self._plane.has_operations_for(peer)
            or self._users.concerns(peer)
            or self._transit.concerns(peer)
            or self._owner.concerns(peer)
        )

    def counts(self) -> dict[str, int]:
        """How many values, references, forks and operations there are, in torch's words where it has one."""
        return {
            "num_owner_rrefs": len(self.owned),
            "num_forks": self._owner.num_forks,
            "num_pending_users": self._users.num_unconfirmed,
            "num_users": len(self.users),
            "num_pending_forks": len(self.passed),
            "num_pending_operations": self._plane.num_operations,
        }

    @property
    def num_kept_ids(self) -> int:
        """Ids of lost messages and orphaned values, which are kept until the worker that made them dies."""
        return self._owner.num_kept_ids + self._transit.num_kept_ids

    def validate(self) -> None:
        """Assert that all parts agree with each other."""
        self._plane.validate()
        self._users.validate()
        self._transit.validate()
        self._owner.validate()
