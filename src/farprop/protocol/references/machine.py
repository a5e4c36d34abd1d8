"""The protocol of remote references, as one worker runs it. Rules that hold here:

- A value is not freed while a reference to it can be reached, on any worker that is alive.
- A reference that is passed on is held by its parent until the owner counts the child: ``Passed``.
- No order of messages is assumed. Operations are done exactly once (``control``).
- When a worker dies, what it held is given back, what it owned is void, and nothing waits for it.

Not thread-safe: the caller sees to it. What has to be done is in ``effects``, in order; the caller empties it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from farprop.ids import GlobalId
from farprop.protocol.references.control import Inbox, Outbox
from farprop.protocol.references.messages import Batch, Fork, Kind, Operation, Reply
from farprop.protocol.references.records import Effect, Happening, OwnedValue, Passed, UserReference
from farprop.protocol.references.states import UNCONFIRMED, User, UserEvent, Value, ValueEvent

_NO_PARENT = -1
_UNREGISTERED = frozenset({User.ARRIVED, User.ARRIVED_DROPPED})
# Contexts end on threads of the program's that have just made calls: sent at once, it costs less than waking the loop.
_URGENT = frozenset({Kind.REGISTER, Kind.REVOKE, Kind.RECALL, Kind.CLEANUP})


class References:
    """See the module's rules."""

    def __init__(self, me: int, numbers: Iterator[int] | None = None) -> None:
        """``numbers`` are those of ids; without them, they are counted."""
        self.me = me
        self.effects: list[Effect] = []
        self.users: dict[GlobalId, UserReference] = {}  # by fork; until they have ended
        self.owned: dict[GlobalId, OwnedValue] = {}  # by rref; while somebody elsewhere refers to it
        self.passed: dict[GlobalId, Passed] = {}
        self.dead: set[int] = set()
        self._numbers = itertools.count() if numbers is None else numbers
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._revoked: set[GlobalId] = set()  # forks that must not be taken if they come after all
        self._recalled: set[GlobalId] = set()  # values whose calls must not be run if they come after all
        self._forgone: set[GlobalId] = set()  # forks of calls that have not come, gone already
        self._orphaned: set[GlobalId] = set()  # values that forks may come of which nobody holds, because of a death
        self._gone: set[GlobalId] = set()  # those of them that were made and freed

    def new_id(self) -> GlobalId:
        return GlobalId(self.me, next(self._numbers))

    # The program of this worker

    def create(self, owner: int) -> UserReference:
        """A reference to what a call that is about to be sent will make at ``owner``, which is another worker."""
        rref, fork = self.new_id(), self.new_id()
        reference = UserReference(owner, rref, fork, _NO_PARENT, User.CREATING, exists=False)
        self.users[fork] = reference
        if owner in self.dead:
            self._user_event(reference, UserEvent.OWNER_DIED)
        return reference

    def made(self, reference: UserReference) -> None:
        """The owner has answered the call that makes the value."""
        if reference.state in (User.CREATING, User.CREATING_DROPPED):
            reference.exists = True
            self._user_event(reference, UserEvent.MADE)

    def unanswered(self, reference: UserReference, lost: bool) -> None:
        """There is no answer, and none will be heard. ``lost``: the call itself may be lost, not only late."""
        if reference.state in (User.CREATING, User.CREATING_DROPPED):
            if lost:
                self._post(reference.owner, Operation(Kind.RECALL, reference.rref, reference.fork))
            self._user_event(reference, UserEvent.UNANSWERED)

    def unsent(self, reference: UserReference) -> None:
        """The call was never sent."""
        if reference.state in (User.CREATING, User.CREATING_DROPPED):
            if reference.early:
                # Those it was passed to may have the owner wait for the call.
                self._post(reference.owner, Operation(Kind.RECALL, reference.rref, reference.fork))
            self._user_event(reference, UserEvent.UNSENT)

    def drop(self, reference: UserReference) -> None:
        """The program can't reach this reference any more."""
        self._user_event(reference, UserEvent.DROP)

    def fork(self, source: UserReference | OwnedValue, to: int, route: object) -> Fork:
        """A reference is about to be sent to a worker, on a connection."""
        fork = self.new_id()
        if isinstance(source, OwnedValue):
            self._share(source)
            source.forks[fork] = to
            made = Fork(self.me, source.rref, fork, exists=True)
        else:
            source.children.add(fork)
            source.early = source.early or not source.exists
            made = Fork(source.owner, source.rref, fork, source.exists)
        self.passed[fork] = Passed(to, source, route)
        if to in self.dead:
            self._safe(fork, counted=False)
        return made

    def own(self) -> OwnedValue:
        """A value of this worker that nobody elsewhere refers to yet."""
        return OwnedValue(self.new_id(), Value.FREED)

    def clean_up(self, peer: int, context: GlobalId) -> None:
        """An autograd context has ended, which another worker has: it has no more to do with references than this
        way of telling it, once and surely.
        """
        self._post(peer, Operation(Kind.CLEANUP, context, context))

    # What comes with calls and answers

    def make(self, creator: int, rref: GlobalId, fork: GlobalId) -> OwnedValue | None:
        """A call came that makes a value here; None if its creator has given it up as lost."""
        if rref in self._recalled or creator in self.dead:
            self._forgone.discard(fork)
            return None
        value = self.owned.get(rref)
        if value is None:
            value = OwnedValue(rref, Value.FREED)
        value.move(ValueEvent.CALL_CAME)
        self.owned[rref] = value
        if fork in self._forgone:
            self._forgone.discard(fork)
        else:
            value.forks[fork] = creator
        self._accept_all(value)
        self._free_if_unused(value)
        return value

    def arrive(self, fork: Fork, sender: int) -> UserReference | OwnedValue:
        """A reference came in a message. One that is of no use is a ``UserReference`` in state VOID."""
        if fork.fork in self._revoked:
            self._revoked.discard(fork.fork)
            return UserReference(fork.owner, fork.rref, fork.fork, sender, User.VOID, fork.exists)
        if fork.owner == self.me:
            return self._come_home(fork, sender)
        from_owner = sender == fork.owner
        state = User.CONFIRMED if from_owner else User.ARRIVED
        reference = UserReference(fork.owner, fork.rref, fork.fork, sender, state, fork.exists)
        self.users[fork.fork] = reference
        if fork.owner in self.dead:
            self._user_event(reference, UserEvent.OWNER_DIED)
        elif from_owner:
            self._post(sender, Operation(Kind.ACCEPT, fork.rref, fork.fork))
        else:
            self._post(fork.owner, Operation(Kind.REGISTER, fork.rref, fork.fork, fork.exists))
        return reference

    def _come_home(self, fork: Fork, sender: int) -> UserReference | OwnedValue:
        value = self._find_or_await(fork.rref, fork.exists)
        if value is None:
            self._post(sender, Operation(Kind.ACCEPT, fork.rref, fork.fork))
            return UserReference(self.me, fork.rref, fork.fork, sender, User.VOID, fork.exists)
        if value.state is Value.AWAITED:
            value.accepts[fork.fork] = sender
        else:
            self._post(sender, Operation(Kind.ACCEPT, fork.rref, fork.fork))
            self._free_if_unused(value)
        return value

    def _find_or_await(self, rref: GlobalId, exists: bool) -> OwnedValue | None:
        """The value; one to wait for if its call may still come; None if it was freed."""
        value = self.owned.get(rref)
        may_come = not exists and rref.created_on != self.me and rref.created_on not in self.dead
        if value is None and may_come and rref not in self._gone:
            value = self.owned[rref] = OwnedValue(rref, Value.AWAITED)
            if rref in self._recalled:
                self._break(value)
        return value

    def find(self, rref: GlobalId) -> OwnedValue | None:
        return self.owned.get(rref)

    def may_come(self, rref: GlobalId) -> bool:
        """Whether the call that makes a value that is not here may still come."""
        return rref not in self._recalled and rref not in self._gone and rref.created_on not in self.dead

    # The network

    def route_lost(self, route: object) -> None:
        """A connection broke, with the peer alive: what was sent on it may have come or not."""
        for fork, passed in list(self.passed.items()):
            if passed.route is route:
                self._post(passed.to, Operation(Kind.REVOKE, passed.source.rref, fork))

    def doubted(self, forks: list[Fork]) -> None:
        """These may have been sent or not."""
        for fork in forks:
            passed = self.passed.get(fork.fork)
            if passed is not None:
                self._post(passed.to, Operation(Kind.REVOKE, fork.rref, fork.fork))

    def undelivered(self, forks: list[Fork]) -> None:
        """These were never sent."""
        for fork in forks:
            self._safe(fork.fork, counted=False)

    def outgoing(self, peer: int) -> Batch | None:
        """What to send to a worker, or to send again."""
        outbox = self._outboxes.get(peer)
        return None if outbox is None else outbox.current()

    def incoming(self, peer: int, batch: Batch) -> Reply:
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = Inbox()
        return inbox.take(batch, lambda operation: self._do(peer, operation))

    def replied(self, peer: int, reply: Reply) -> None:
        outbox = self._outboxes.get(peer)
        batch = None if outbox is None else outbox.replied(reply)
        if outbox is None or batch is None:
            return
        for operation, done in zip(batch.operations, reply.results, strict=True):
            self._answered(operation, bool(done))
        if not outbox.empty:
            self.effects.append(Effect(Happening.SEND, peer))

    def died(self, peer: int) -> None:
        """A worker is gone for good. Nothing that it sent comes after this."""
        if peer in self.dead:
            return
        self.dead.add(peer)
        self._outboxes.pop(peer, None)
        self._inboxes.pop(peer, None)
        self._revoked = {fork for fork in self._revoked if fork.created_on != peer}
        self._recalled = {rref for rref in self._recalled if rref.created_on != peer}
        self._forgone = {fork for fork in self._forgone if fork.created_on != peer}
        self._orphaned = {rref for rref in self._orphaned if rref.created_on != peer}
        self._gone = {rref for rref in self._gone if rref.created_on != peer}
        for reference in [r for r in self.users.values() if r.owner == peer and r.state is not User.VOID]:
            self._user_event(reference, UserEvent.OWNER_DIED)
        for fork in [fork for fork, passed in self.passed.items() if passed.to == peer]:
            self._leaves_orphans(fork)
            self._safe(fork, counted=False)
        for value in list(self.owned.values()):
            if peer in value.forks.values():
                value.forks = {fork: holder for fork, holder in value.forks.items() if holder != peer}
                if value.rref.created_on not in (self.me, peer):
                    self._orphaned.add(value.rref)
            if value.state is Value.AWAITED and value.rref.created_on == peer:
                self._break(value)
            self._free_if_unused(value)

    # Operations that others ask for

    def _do(self, peer: int, operation: Operation) -> bool:
        kind, rref, fork, flag = operation
        if kind is Kind.REGISTER:
            return self._register(peer, rref, fork, exists=flag)
        if kind is Kind.ACCEPT:
            if flag:
                self._leaves_orphans(fork)
            self._safe(fork, counted=True)
            return True
        if kind is Kind.REVOKE:
            return self._revoke(rref, fork)
        if kind is Kind.RECALL:
            return self._recall(rref, fork)
        if kind is Kind.CLEANUP:
            return True  # the caller's business
        if flag:
            self._orphaned.add(rref)
        value = self.owned.get(rref)
        if value is not None and value.forks.pop(fork, None) is not None:
            self._free_if_unused(value)
        elif kind is Kind.FORGO and rref not in self._recalled:
            self._forgone.add(fork)
        return True

    def _register(self, peer: int, rref: GlobalId, fork: GlobalId, exists: bool) -> bool:
        value = self._find_or_await(rref, exists)
        if value is None:
            return False
        value.forks[fork] = peer
        return True

    def _revoke(self, rref: GlobalId, fork: GlobalId) -> bool:
        """Whether the fork came. If not, it is refused from now on."""
        value = self.owned.get(rref)
        if fork in self.users or (value is not None and fork in value.accepts):
            return True
        self._revoked.add(fork)
        return False

    def _recall(self, rref: GlobalId, fork: GlobalId) -> bool:
        """Whether the call came that makes the value. If not, it is not run if it comes."""
        value = self.owned.get(rref)
        if value is not None and fork in value.forks:
            return True
        self._recalled.add(rref)
        if value is not None and value.state is Value.AWAITED:
            self._break(value)
            self._free_if_unused(value)
        return False

    # Operations of ours that were answered

    def _answered(self, operation: Operation, done: bool) -> None:
        if operation.kind is Kind.REGISTER:
            self._registered(operation.fork, done)
        elif operation.kind is Kind.REVOKE and not done:
            self._leaves_orphans(operation.fork)  # it may have come, and ended again
            self._safe(operation.fork, counted=False)
        elif operation.kind is Kind.RECALL and not done:
            self._never_came(operation.fork)

    def _registered(self, fork: GlobalId, counted: bool) -> None:
        reference = self.users.get(fork)
        if reference is not None and reference.state in (User.ARRIVED, User.ARRIVED_DROPPED):
            reference.exists = reference.exists or counted
            self._user_event(reference, UserEvent.REGISTERED if counted else UserEvent.REFUSED)

    def _never_came(self, fork: GlobalId) -> None:
        reference = self.users.get(fork)
        if reference is not None and reference.state in (User.DOUBTFUL, User.DROPPED):
            self._user_event(reference, UserEvent.NEVER_CAME)

    # What follows from what

    def _user_event(self, reference: UserReference, event: UserEvent) -> None:
        before = reference.state
        reference.move(event)
        if before in _UNREGISTERED and reference.state not in _UNREGISTERED:
            self.effects.append(Effect(Happening.SETTLED, reference))
            # Counted or not, the parent need not hold its own for this one any more.
            orphans = reference.early and event is not UserEvent.REGISTERED
            self._post(reference.parent, Operation(Kind.ACCEPT, reference.rref, reference.fork, orphans))
        if reference.state is User.CONFIRMED:
            self.effects.append(Effect(Happening.CONFIRMED, reference))
        elif reference.state is User.VOID:
            self.effects.append(Effect(Happening.VOID, reference))
        elif reference.state is User.DROPPED:
            self._release_if_free(reference)
        elif reference.state is User.ENDED:
            self.users.pop(reference.fork, None)

    def _release_if_free(self, reference: UserReference) -> None:
        if reference.state is User.DROPPED and not reference.children:
            kind = Kind.DELETE if reference.exists else Kind.FORGO
            self._post(reference.owner, Operation(kind, reference.rref, reference.fork, reference.orphans))
            self._user_event(reference, UserEvent.CHILDREN_SAFE)

    def _leaves_orphans(self, fork: GlobalId) -> None:
        """A fork that we passed on will not be counted, and who had it may have passed it on."""
        passed = self.passed.get(fork)
        if passed is not None and isinstance(passed.source, UserReference):
            passed.source.orphans = passed.source.early

    def _safe(self, fork: GlobalId, counted: bool) -> None:
        """A fork that we passed on needs us no more: it is counted, or it will never be."""
        passed = self.passed.pop(fork, None)
        if passed is None:
            return
        source = passed.source
        if isinstance(source, UserReference):
            source.children.discard(fork)
            self._release_if_free(source)
        elif not counted or passed.to == self.me:
            source.forks.pop(fork, None)
            self._free_if_unused(source)

    def _share(self, value: OwnedValue) -> None:
        if value.state is Value.FREED:
            value.move(ValueEvent.SHARED)
            self.owned[value.rref] = value

    def _accept_all(self, value: OwnedValue) -> None:
        accepts, value.accepts = value.accepts, {}
        for fork, parent in accepts.items():
            self._post(parent, Operation(Kind.ACCEPT, value.rref, fork))

    def _break(self, value: OwnedValue) -> None:
        value.move(ValueEvent.CALL_LOST)
        self.effects.append(Effect(Happening.BROKEN, value))
        self._accept_all(value)

    def _free_if_unused(self, value: OwnedValue) -> None:
        if not value.forks and not value.accepts and value.state is not Value.FREED:
            if value.state is Value.AWAITED:
                self.effects.append(Effect(Happening.BROKEN, value))
            elif value.state is Value.MADE and value.rref in self._orphaned:
                self._gone.add(value.rref)
            value.move(ValueEvent.LAST_GONE)
            self.owned.pop(value.rref, None)
            self.effects.append(Effect(Happening.FREED, value))

    def _post(self, peer: int, operation: Operation) -> None:
        if peer == self.me:
            self._answered(operation, self._do(peer, operation))
        elif peer not in self.dead:
            outbox = self._outboxes.get(peer)
            if outbox is None:
                outbox = self._outboxes[peer] = Outbox()
            first = outbox.empty
            outbox.add(operation)
            if operation.kind in _URGENT:
                self.effects.append(Effect(Happening.SEND, peer))
            elif first:  # else it goes with what is to be sent already, or after the answer to what was
                self.effects.append(Effect(Happening.SEND_LATER, peer))

    # Looking

    @property
    def settled(self) -> bool:
        """Nothing is on its way or in doubt: what is here stays as it is until somebody does something."""
        return (
            all(outbox.empty for outbox in self._outboxes.values())
            and not self.passed
            and not any(reference.state in UNCONFIRMED for reference in self.users.values())
        )

    def concerns(self, peer: int) -> bool:
        """Whether the death of a worker would change anything here."""
        outbox = self._outboxes.get(peer)
        return (
            (outbox is not None and not outbox.empty)
            or any(reference.owner == peer for reference in self.users.values())
            or any(passed.to == peer for passed in self.passed.values())
            or any(
                peer in value.forks.values() or peer in value.accepts.values() or value.rref.created_on == peer
                for value in self.owned.values()
            )
        )

    def counts(self) -> dict[str, int]:
        return {
            "num_owner_rrefs": len(self.owned),
            "num_forks": sum(len(value.forks) for value in self.owned.values()),
            "num_pending_users": sum(reference.state in UNCONFIRMED for reference in self.users.values()),
            "num_users": len(self.users),
            "num_pending_forks": len(self.passed),
            "num_pending_operations": sum(len(outbox.operations()) for outbox in self._outboxes.values()),
        }

    def validate(self) -> None:
        for fork, reference in self.users.items():
            assert fork == reference.fork
            assert reference.state is not User.ENDED
            assert reference.state is not User.DROPPED or reference.children, "dropped, free, and still here"
            assert reference.owner not in self.dead or reference.state is User.VOID
            assert all(self.passed[child].source is reference for child in reference.children)
        for fork, passed in self.passed.items():
            held = passed.source.children if isinstance(passed.source, UserReference) else passed.source.forks
            assert fork in held, "a fork on its way is not held"
            assert passed.to not in self.dead
        for rref, value in self.owned.items():
            assert rref == value.rref
            assert value.state is not Value.FREED
            assert value.forks or value.accepts, "nobody refers to it, and it is still here"
            assert not value.accepts or value.state is Value.AWAITED
            assert not self.dead.intersection(value.forks.values())
        assert not self.dead.intersection(peer for peer, outbox in self._outboxes.items() if not outbox.empty)
