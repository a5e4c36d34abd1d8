"""The machine with one thing wrong in it, to see that the checks notice. Each flaw takes the place of a method."""

from __future__ import annotations

from collections.abc import Callable

from farprop.ids import GlobalId
from farprop.protocol.references.control import Inbox, Outbox
from farprop.protocol.references.machine import References
from farprop.protocol.references.messages import Batch, Fork, Kind, Operation, Reply
from farprop.protocol.references.records import Effect, Happening, OwnedValue, UserReference
from farprop.protocol.references.states import User, UserEvent, Value
from tests.simulation.planting import FLAWS, flaw, planted

__all__ = ["FLAWS", "planted"]

_HEALTHY = {name: value for name, value in vars(References).items() if callable(value)}


# Batches


@flaw(Inbox, "take")
def batches_done_again(self: Inbox, batch: Batch, do: Callable[[Operation], bool]) -> Reply:
    """A batch that comes again is done again."""
    return Reply(batch.number, bytes([do(operation) for operation in batch.operations]))


@flaw(Outbox, "replied")
def numbers_restart(self: Outbox, reply: Reply) -> Batch | None:
    """The numbers of batches start again when everything is answered."""
    batch = self._batch
    if batch is None or batch.number != reply.number or len(reply.results) != len(batch.operations):
        return None
    self._batch = None
    if not self._waiting:
        self._number = 0
    return batch


@flaw(Outbox, "replied")
def any_reply_will_do(self: Outbox, reply: Reply) -> Batch | None:
    """A reply to an earlier batch is taken for one to this."""
    batch = self._batch
    if batch is None or len(reply.results) != len(batch.operations):
        return None
    self._batch = None
    return batch


@flaw(Outbox, "current")
def batches_grow(self: Outbox) -> Batch | None:
    """Operations join a batch that is on its way already."""
    if self._batch is None and self._waiting:
        self._number += 1
        self._batch = Batch(self._number, ())
    if self._batch is not None and self._waiting:
        self._batch = Batch(self._number, (*self._batch.operations, *self._waiting))
        self._waiting.clear()
    return self._batch


# Passing


@flaw(References, "arrive")
def confirmed_on_arrival(self: References, fork: Fork, sender: int) -> UserReference | OwnedValue:
    """A reference from another user is taken for counted before the owner has said so."""
    thing = _HEALTHY["arrive"](self, fork, sender)
    if thing.state is User.ARRIVED:
        self._user_event(thing, UserEvent.REGISTERED)
    return thing


@flaw(References, "arrive")
def accepted_on_arrival(self: References, fork: Fork, sender: int) -> UserReference | OwnedValue:
    """The parent is told that it need not hold its own before the owner counts the child."""
    thing = _HEALTHY["arrive"](self, fork, sender)
    if thing.state is User.ARRIVED:
        self._post(sender, Operation(Kind.ACCEPT, fork.rref, fork.fork))
    return thing


@flaw(References, "_release_if_free")
def children_not_held(self: References, reference: UserReference) -> None:
    """A dropped reference is given back although somebody it was passed to is not counted."""
    if reference.state is User.DROPPED:
        kind = Kind.DELETE if reference.exists else Kind.FORGO
        self._post(reference.owner, Operation(kind, reference.rref, reference.fork, reference.orphans))
        self._user_event(reference, UserEvent.CHILDREN_SAFE)


@flaw(References, "fork")
def own_fork_not_counted(self: References, source: UserReference | OwnedValue, to: int, route: object) -> Fork:
    """The owner does not count a fork that it sends."""
    fork = _HEALTHY["fork"](self, source, to, route)
    if isinstance(source, OwnedValue) and self.passed.pop(fork.fork, None):
        source.forks.pop(fork.fork)
        self._free_if_unused(source)
    return fork


@flaw(References, "fork")
def early_forks_say_exists(self: References, source: UserReference | OwnedValue, to: int, route: object) -> Fork:
    """A fork of a value that is still to be made says that the owner has it."""
    return _HEALTHY["fork"](self, source, to, route)._replace(exists=True)


@flaw(References, "_safe")
def accepted_is_gone(self: References, fork: GlobalId, counted: bool) -> None:
    """The owner stops counting a fork when it is accepted."""
    _HEALTHY["_safe"](self, fork, False)


@flaw(References, "_find_or_await")
def never_awaited(self: References, rref: GlobalId, exists: bool) -> OwnedValue | None:
    """The owner refuses forks that come before the call that makes the value."""
    return self.owned.get(rref)


@flaw(References, "_accept_all")
def awaited_never_accepted(self: References, value: OwnedValue) -> None:
    """Forks that came to the owner before the value are not accepted when it is made."""
    value.accepts = {}


# Calls without answers, and lost messages


@flaw(References, "_do")
def forgo_forgotten(self: References, peer: int, operation: Operation) -> bool:
    """FORGO does nothing if the call has not come."""
    result: bool = _HEALTHY["_do"](self, peer, operation)
    self._forgone.discard(operation.fork)
    return result


@flaw(References, "_release_if_free")
def doubtful_ends_silently(self: References, reference: UserReference) -> None:
    """The owner is not told when a reference ends whose call had no answer."""
    if reference.state is User.DROPPED and not reference.children and not reference.exists:
        self._user_event(reference, UserEvent.CHILDREN_SAFE)
    else:
        _HEALTHY["_release_if_free"](self, reference)


@flaw(References, "route_lost")
def lost_route_ignored(self: References, route: object) -> None:
    """Nobody asks after the forks in messages on a broken connection."""


@flaw(References, "doubted")
def doubts_ignored(self: References, forks: list[Fork]) -> None:
    """Nobody asks after the forks in a message that may not have been sent."""


@flaw(References, "_revoke")
def revoke_forgotten(self: References, rref: GlobalId, fork: GlobalId) -> bool:
    """A fork that was given up as lost is taken when it comes after all."""
    came: bool = _HEALTHY["_revoke"](self, rref, fork)
    self._revoked.discard(fork)
    return came


@flaw(References, "_revoke")
def never_came_taken_for_came(self: References, rref: GlobalId, fork: GlobalId) -> bool:
    """REVOKE is always answered with yes."""
    return True


@flaw(References, "_recall")
def recall_forgotten(self: References, rref: GlobalId, fork: GlobalId) -> bool:
    """A call that was given up as lost is run when it comes after all."""
    came: bool = _HEALTHY["_recall"](self, rref, fork)
    self._recalled.discard(rref)
    return came


@flaw(References, "_recall")
def recall_does_not_break(self: References, rref: GlobalId, fork: GlobalId) -> bool:
    """Those who wait for the value of a lost call are not told."""
    value = self.owned.get(rref)
    if value is not None and fork in value.forks:
        return True
    self._recalled.add(rref)
    return False


@flaw(References, "unsent")
def unsent_not_recalled(self: References, reference: UserReference) -> None:
    """The owner waits for a call that was never sent."""
    if reference.state in (User.CREATING, User.CREATING_DROPPED):
        self._user_event(reference, UserEvent.UNSENT)


@flaw(References, "_come_home")
def broken_value_kept(self: References, fork: Fork, sender: int) -> UserReference | OwnedValue:
    """A fork that comes to the owner after its value was recalled leaves a record that nobody removes."""
    value = self._find_or_await(fork.rref, fork.exists)
    if value is None or value.state is not Value.BROKEN:
        return _HEALTHY["_come_home"](self, fork, sender)
    self._post(sender, Operation(Kind.ACCEPT, fork.rref, fork.fork))
    return value


# Deaths


@flaw(References, "died")
def dead_holders_counted(self: References, peer: int) -> None:
    """The owner goes on counting the forks of a dead worker."""
    kept = {rref: {f: h for f, h in value.forks.items() if h == peer} for rref, value in self.owned.items()}
    _HEALTHY["died"](self, peer)
    for rref, forks in kept.items():
        if rref in self.owned:
            self.owned[rref].forks.update(forks)


@flaw(References, "died")
def dead_receivers_waited_for(self: References, peer: int) -> None:
    """A reference is held for a fork that was passed to a dead worker."""
    kept = {fork: passed for fork, passed in self.passed.items() if passed.to == peer}
    for fork in kept:
        del self.passed[fork]
    _HEALTHY["died"](self, peer)
    self.passed.update(kept)


@flaw(References, "died")
def dead_creators_waited_for(self: References, peer: int) -> None:
    """The owner waits for calls of a dead worker."""
    awaited = [v for v in self.owned.values() if v.state is Value.AWAITED and v.rref.created_on == peer and v.accepts]
    for value in awaited:
        del self.owned[value.rref]
    _HEALTHY["died"](self, peer)
    self.owned.update({value.rref: value for value in awaited})


@flaw(References, "_registered")
def refused_not_accepted(self: References, fork: GlobalId, counted: bool) -> None:
    """A parent is not told when the owner refuses the child."""
    reference = self.users.get(fork)
    if counted or reference is None or reference.state not in (User.ARRIVED, User.ARRIVED_DROPPED):
        _HEALTHY["_registered"](self, fork, counted)
        return
    reference.move(UserEvent.REFUSED)
    self.effects.append(Effect(Happening.SETTLED, reference))
    if reference.state is User.ENDED:
        del self.users[fork]


@flaw(References, "_post")
def dead_owner_not_accepted(self: References, peer: int, operation: Operation) -> None:
    """A parent is not told when the owner of the child dies."""
    reference = self.users.get(operation.fork)
    if operation.kind is Kind.ACCEPT and reference is not None and reference.owner in self.dead:
        return
    _HEALTHY["_post"](self, peer, operation)


@flaw(References, "_find_or_await")
def orphans_await_the_freed(self: References, rref: GlobalId, exists: bool) -> OwnedValue | None:
    """A fork whose parent died is taken for one that came before the value, though the value was made and freed."""
    self._gone.clear()
    return _HEALTHY["_find_or_await"](self, rref, exists)


@flaw(References, "died")
def awaited_broken_by_any_death(self: References, peer: int) -> None:
    """The owner does not wait for a value if whoever passed it the reference dies, though its creator lives."""
    for value in self.owned.values():
        value.accepts = {fork: parent for fork, parent in value.accepts.items() if parent != peer}
    _HEALTHY["died"](self, peer)


@flaw(References, "_leaves_orphans")
def orphans_forgotten(self: References, fork: GlobalId) -> None:
    """Nobody tells the owner that there may be forks which a death has cut off."""
