"""Mutants of the protocol of remote references, to see that the simulation kills them. Each replaces one method."""

from __future__ import annotations

from collections.abc import Callable

from farprop.ids import GlobalId
from farprop.protocol.references.control_plane import (
    Batch,
    ControlReply,
    Operation,
    OperationKind,
    ReliableReceiver,
    ReliableSender,
)
from farprop.protocol.references.forks_in_transit import ForksInTransit
from farprop.protocol.references.owner_side import OwnerSide
from farprop.protocol.references.records import (
    Fork,
    OwnedValue,
    ReturnedFork,
    User,
    UserEvent,
    UserReference,
    Value,
)
from farprop.protocol.references.state_machine import RRefStateMachine
from farprop.protocol.references.user_side import UserSide
from tests.simulation.harness import MUTANTS, mutant, mutated

__all__ = ["MUTANTS", "mutated"]

_arrive, _fork, _release = ForksInTransit.arrive, ForksInTransit.fork, ForksInTransit.release
_revoke, _lend = ForksInTransit.revoke, ForksInTransit.lend
_forget = ReliableSender.forget
_come_home, _find_or_await, _forgo = OwnerSide.come_home, OwnerSide._find_or_await, OwnerSide.forgo
_recall, _owner_on_death, _borrow = OwnerSide.recall, OwnerSide.on_death, OwnerSide.borrow
_release_if_free, _on_registered, _release_parent = (
    UserSide.release_if_free,
    UserSide.on_registered,
    UserSide._release_parent,
)
_give_back, _drop, _users_on_death = UserSide.give_back, UserSide.drop, UserSide.on_death


# Batches


@mutant(ReliableReceiver, "take")
def batches_done_again(self: ReliableReceiver, batch: Batch, execute: Callable[[Operation], bool]) -> ControlReply:
    """A batch that arrives again is applied again."""
    return ControlReply(batch.number, bytes([execute(operation) for operation in batch.operations]))


@mutant(ReliableSender, "forget")
def numbers_restart(self: ReliableSender, batch: Batch) -> None:
    """The numbers of batches start again when everything is answered."""
    _forget(self, batch)
    if not self._waiting:
        self._number = 0


@mutant(ReliableSender, "batch_of")
def any_reply_will_do(self: ReliableSender, reply: ControlReply) -> Batch | None:
    """A reply to an earlier batch is taken for one to this."""
    batch = self._batch
    return None if batch is None or len(reply.results) != len(batch.operations) else batch


@mutant(ReliableSender, "current")
def batches_grow(self: ReliableSender) -> Batch | None:
    """Operations are added to a batch that is already in flight."""
    if self._batch is None and self._waiting:
        self._number += 1
        self._batch = Batch(self._number, ())
    if self._batch is not None:
        self._batch = Batch(self._number, tuple(self._waiting))
    return self._batch


# Passing


@mutant(ForksInTransit, "arrive")
def confirmed_on_arrival(self: ForksInTransit, fork: Fork, sender: int, borrow: bool) -> UserReference | OwnedValue:
    """A reference from another user is taken for listed before the owner has said so."""
    thing = _arrive(self, fork, sender, borrow)
    if isinstance(thing, UserReference) and thing.state is User.ARRIVED:
        self._users.move(thing, UserEvent.REGISTERED)
    return thing


@mutant(ForksInTransit, "arrive")
def accepted_on_arrival(self: ForksInTransit, fork: Fork, sender: int, borrow: bool) -> UserReference | OwnedValue:
    """The parent is told that it may release its reference before the owner lists the child."""
    thing = _arrive(self, fork, sender, borrow)
    if thing.state is User.ARRIVED:
        self._plane.post(sender, Operation(OperationKind.ACCEPT, fork.rref, fork.fork))
    return thing


@mutant(UserSide, "release_if_free")
def children_not_held(self: UserSide, reference: UserReference) -> None:
    """A dropped reference is deleted although the owner does not yet list a fork made from it."""
    if reference.state is User.DROPPED:
        kind = OperationKind.DELETE if reference.exists else OperationKind.FORGO
        self._plane.post(reference.owner, Operation(kind, reference.rref, reference.fork, reference.orphans))
        self.move(reference, UserEvent.CHILDREN_SAFE)


@mutant(ForksInTransit, "fork")
def own_fork_not_listed(self: ForksInTransit, source: UserReference | OwnedValue, to: int, route: object) -> Fork:
    """The owner does not list a fork that it sends."""
    fork = _fork(self, source, to, route)
    if isinstance(source, OwnedValue) and self.passed.pop(fork.fork, None):
        self._owner.unlist_fork(source, fork.fork)
    return fork


@mutant(ForksInTransit, "fork")
def early_forks_say_exists(self: ForksInTransit, source: UserReference | OwnedValue, to: int, route: object) -> Fork:
    """A fork of a value that is not made yet says that the value exists."""
    return _fork(self, source, to, route)._replace(exists=True)


@mutant(ForksInTransit, "lend")
def lent_before_it_is_listed(self: ForksInTransit, source: UserReference | OwnedValue, to: int) -> Fork | None:
    """A reference is lent to its owner before the owner lists it."""
    if isinstance(source, UserReference) and source.owner == to:
        return Fork(source.owner, source.rref, source.fork, exists=True, lent=True)
    return None


@mutant(ForksInTransit, "lend")
def lent_to_anybody(self: ForksInTransit, source: UserReference | OwnedValue, to: int) -> Fork | None:
    """A reference is lent to a worker that does not own the value."""
    if isinstance(source, UserReference) and source.state is User.CONFIRMED:
        return Fork(source.owner, source.rref, source.fork, exists=True, lent=True)
    return None


@mutant(OwnerSide, "borrow")
def lent_and_not_awaited(self: OwnerSide, fork: Fork, sender: int) -> UserReference | OwnedValue:
    """A value that is awaited is given up although the program has a lent reference to it."""
    value = _borrow(self, fork, sender)
    if isinstance(value, OwnedValue):
        value.accepts.pop(fork.fork, None)
    return value


@mutant(OwnerSide, "find_lent")
def lent_and_found_too_early(self: OwnerSide, fork: Fork, sender: int) -> OwnedValue | None:
    """A lent reference to a value that is awaited is taken as if the value were made."""
    return self.values.get(fork.rref)


@mutant(ForksInTransit, "release")
def accepted_is_gone(self: ForksInTransit, fork: GlobalId, listed: bool) -> None:
    """The owner removes a fork from its list when the fork is accepted."""
    _release(self, fork, listed=False)


@mutant(OwnerSide, "_find_or_await")
def never_awaited(self: OwnerSide, rref: GlobalId, exists: bool) -> OwnedValue | None:
    """The owner refuses forks that arrive before the call that makes the value."""
    return self.values.get(rref)


@mutant(OwnerSide, "_accept_all")
def awaited_never_accepted(self: OwnerSide, value: OwnedValue) -> None:
    """Forks that reached the owner before the value are not accepted when it is made."""
    value.accepts = {}


# Borrowing


@mutant(UserSide, "give_back")
def given_back_too_early(self: UserSide, reference: UserReference) -> ReturnedFork | None:
    """A borrowed reference is given back although forks made from it depend on it."""
    children, reference.children = reference.children, set()
    returned = _give_back(self, reference)
    reference.children = children
    return returned


@mutant(UserSide, "drop")
def dropped_too_early(self: UserSide, reference: UserReference) -> None:
    """A borrowed reference that was passed on is dropped without being listed."""
    children, reference.children = reference.children, set()
    _drop(self, reference)
    reference.children = children


@mutant(UserSide, "drop")
def return_forgotten(self: UserSide, reference: UserReference) -> None:
    """The sender of a borrowed reference is not told of its end if no answer can do so."""
    if reference.state is User.BORROWED and not reference.children:
        self.move(reference, UserEvent.DROP)
    else:
        _drop(self, reference)


@mutant(UserSide, "keep")
def kept_without_registering(self: UserSide, reference: UserReference) -> None:
    """The owner is not asked to list a borrowed reference that outlives its call."""
    if reference.state is User.BORROWED:
        self.move(reference, UserEvent.KEPT)


@mutant(UserSide, "keep")
def kept_for_granted(self: UserSide, reference: UserReference) -> None:
    """A borrowed reference that outlives its call is taken for listed, whoever sent it."""
    if reference.state is User.BORROWED:
        self.move(reference, UserEvent.KEPT)
        self.move(reference, UserEvent.REGISTERED)


@mutant(ForksInTransit, "on_returned")
def returned_is_listed(self: ForksInTransit, receiver: int, fork: GlobalId, orphans: bool) -> None:
    """The owner goes on listing a fork that is given back."""
    self.on_accept(fork, orphans)


@mutant(ForksInTransit, "revoke")
def borrowed_beyond_a_break(self: ForksInTransit, rref: GlobalId, fork: GlobalId) -> bool:
    """A borrowed reference waits for the answer of its call although the connection is broken."""
    return fork in self._users.references or _revoke(self, rref, fork)


@mutant(UserSide, "on_death")
def borrowed_from_the_dead(self: UserSide, peer: int) -> None:
    """A reference that a dead worker lent is not registered."""
    for reference in [r for r in self.references.values() if r.owner == peer and r.state is not User.VOID]:
        self.move(reference, UserEvent.OWNER_DIED)


@mutant(UserSide, "on_death")
def borrowed_void_not_accepted(self: UserSide, peer: int) -> None:
    """A parent is not told when the owner of a borrowed reference dies."""
    for reference in self.references.values():
        if reference.owner == peer and reference.state is User.BORROWED:
            reference.move(UserEvent.OWNER_DIED)
    _users_on_death(self, peer)


@mutant(RRefStateMachine, "not_returned")
def unsent_return_forgotten(self: RRefStateMachine, peer: int, forks: list[ReturnedFork]) -> None:
    """Forks in an answer that was not sent are not given back otherwise."""


@mutant(ForksInTransit, "lend")
def borrowed_lent_on(self: ForksInTransit, source: UserReference | OwnedValue, to: int) -> Fork | None:
    """A borrowed reference that the owner does not list is lent to the owner."""
    if isinstance(source, UserReference) and source.owner == to and source.state is User.BORROWED:
        return Fork(source.owner, source.rref, source.fork, exists=True, lent=True)
    return _lend(self, source, to)


# Calls without answers, and lost messages


@mutant(OwnerSide, "forgo")
def forgo_forgotten(self: OwnerSide, rref: GlobalId, fork: GlobalId, orphans: bool) -> None:
    """FORGO does nothing if the call has not arrived."""
    _forgo(self, rref, fork, orphans)
    self._forgone.discard(fork)


@mutant(UserSide, "release_if_free")
def doubtful_ends_silently(self: UserSide, reference: UserReference) -> None:
    """The owner is not told when a reference whose call had no answer ends."""
    if reference.state is User.DROPPED and not reference.children and not reference.exists:
        self.move(reference, UserEvent.CHILDREN_SAFE)
    else:
        _release_if_free(self, reference)


@mutant(ForksInTransit, "route_lost")
def lost_route_ignored(self: ForksInTransit, route: object) -> None:
    """Forks in messages on a broken connection are not revoked."""


@mutant(ForksInTransit, "doubted")
def doubts_ignored(self: ForksInTransit, forks: list[Fork]) -> None:
    """Forks in a message that may not have been sent are not revoked."""


@mutant(ForksInTransit, "revoke")
def revoke_forgotten(self: ForksInTransit, rref: GlobalId, fork: GlobalId) -> bool:
    """A revoked fork is accepted when it arrives after all."""
    came = _revoke(self, rref, fork)
    self._revoked.discard(fork)
    return came


@mutant(ForksInTransit, "revoke")
def never_came_taken_for_came(self: ForksInTransit, rref: GlobalId, fork: GlobalId) -> bool:
    """REVOKE is always answered with yes."""
    return True


@mutant(OwnerSide, "recall")
def recall_forgotten(self: OwnerSide, rref: GlobalId, fork: GlobalId) -> bool:
    """A recalled call is run when it arrives after all."""
    came = _recall(self, rref, fork)
    self._recalled.discard(rref)
    return came


@mutant(OwnerSide, "recall")
def recall_does_not_break(self: OwnerSide, rref: GlobalId, fork: GlobalId) -> bool:
    """A value that is awaited from a lost call is not broken."""
    value = self.values.get(rref)
    if value is not None and fork in value.forks:
        return True
    self._recalled.add(rref)
    return False


@mutant(UserSide, "unsent")
def unsent_not_recalled(self: UserSide, reference: UserReference) -> None:
    """The owner waits for a call that was never sent."""
    if reference.state in (User.CREATING, User.CREATING_DROPPED):
        self.move(reference, UserEvent.UNSENT)


@mutant(OwnerSide, "come_home")
def broken_value_kept(self: OwnerSide, fork: Fork, sender: int) -> UserReference | OwnedValue:
    """A fork that reaches the owner after its value was recalled leaves a record that nobody removes."""
    value = self._find_or_await(fork.rref, fork.exists)
    if value is None or value.state is not Value.BROKEN:
        return _come_home(self, fork, sender)
    self._plane.post(sender, Operation(OperationKind.ACCEPT, fork.rref, fork.fork))
    return value


# Deaths


@mutant(OwnerSide, "on_death")
def dead_holders_listed(self: OwnerSide, peer: int) -> None:
    """The owner goes on listing the forks of a dead worker."""
    kept = {rref: {f: h for f, h in value.forks.items() if h == peer} for rref, value in self.values.items()}
    _owner_on_death(self, peer)
    for rref, forks in kept.items():
        if rref in self.values:
            self.values[rref].forks.update(forks)


@mutant(ForksInTransit, "on_death")
def dead_receivers_waited_for(self: ForksInTransit, peer: int) -> None:
    """A reference is held for a fork that was passed to a dead worker."""


@mutant(OwnerSide, "on_death")
def dead_creators_waited_for(self: OwnerSide, peer: int) -> None:
    """The owner waits for calls of a dead worker."""
    awaited = [v for v in self.values.values() if v.state is Value.AWAITED and v.rref.created_on == peer and v.accepts]
    for value in awaited:
        del self.values[value.rref]
    _owner_on_death(self, peer)
    self.values.update({value.rref: value for value in awaited})


@mutant(UserSide, "_release_parent")
def refused_not_accepted(self: UserSide, reference: UserReference, event: UserEvent) -> None:
    """A parent is not told when the owner refuses the child."""
    if event is not UserEvent.REFUSED:
        _release_parent(self, reference, event)


@mutant(UserSide, "_release_parent")
def dead_owner_not_accepted(self: UserSide, reference: UserReference, event: UserEvent) -> None:
    """A parent is not told when the owner of the child dies."""
    if event is not UserEvent.OWNER_DIED:
        _release_parent(self, reference, event)


@mutant(OwnerSide, "_find_or_await")
def orphans_await_the_freed(self: OwnerSide, rref: GlobalId, exists: bool) -> OwnedValue | None:
    """The owner awaits the value of a fork whose parent died, though the value was made and freed."""
    self._freed_orphaned.clear()
    return _find_or_await(self, rref, exists)


@mutant(OwnerSide, "on_death")
def awaited_broken_by_any_death(self: OwnerSide, peer: int) -> None:
    """The owner stops waiting for a value if the worker that passed it the reference dies, though its creator lives."""
    for value in self.values.values():
        value.accepts = {fork: parent for fork, parent in value.accepts.items() if parent != peer}
    _owner_on_death(self, peer)


@mutant(ForksInTransit, "_note_orphans")
def orphans_forgotten(self: ForksInTransit, fork: GlobalId) -> None:
    """The owner is not told that there may be orphaned forks."""
