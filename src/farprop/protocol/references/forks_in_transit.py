"""Forks on their way between workers: those that this worker has sent, and those that reach it.

The parent holds its own reference until the owner lists the child, so that the value can't be freed meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from farprop.ids import GlobalId
from farprop.protocol.references.control_plane import ControlPlane, Operation, OperationKind
from farprop.protocol.references.owner_side import OwnerSide
from farprop.protocol.references.records import Fork, OwnedValue, PassedFork, User, UserReference
from farprop.protocol.references.user_side import UserSide


class ForksInTransit:
    """Forks that this worker has sent and that are not known to be listed, by id."""

    def __init__(self, plane: ControlPlane, users: UserSide, owner: OwnerSide) -> None:
        self._plane = plane
        self._users = users
        self._owner = owner
        self.passed: dict[GlobalId, PassedFork] = {}
        self._revoked: set[GlobalId] = set()  # forks that are refused if they arrive after all

    def lend(self, source: UserReference | OwnedValue, to: int) -> Fork | None:
        """A fork for a request, if the owner gets it: the caller holds its own reference until the call has ended."""
        if (
            isinstance(source, UserReference)
            and source.owner == to
            and (source.state is User.CONFIRMED or (source.state is User.BORROWED and source.parent == to))
        ):
            return Fork(source.owner, source.rref, source.fork, exists=True, lent=True)
        return None

    def fork(self, source: UserReference | OwnedValue, to: int, route: object) -> Fork:
        made = self.prepare(source)
        self.send(made, source, to, route)
        return made

    def prepare(self, source: UserReference | OwnedValue) -> Fork:
        if isinstance(source, OwnedValue):
            return Fork(self._plane.own_rank, source.rref, self._plane.new_id(), exists=True)
        return Fork(source.owner, source.rref, self._plane.new_id(), source.exists)

    def send(self, made: Fork, source: UserReference | OwnedValue, to: int, route: object) -> None:
        fork = made.fork
        self.passed[fork] = PassedFork(to, source, route)  # first: ``release`` undoes everything that follows
        if isinstance(source, OwnedValue):
            self._owner.list_fork(source, fork, to)
        else:
            source.early = source.early or not made.exists
            source.children.add(fork)
        if to in self._plane.dead:
            self.release(fork, listed=False)

    def arrive(self, fork: Fork, sender: int, borrow: bool) -> UserReference | OwnedValue:
        if fork.fork in self._revoked:
            self._revoked.discard(fork.fork)
            return UserReference(fork.owner, fork.rref, fork.fork, sender, User.VOID, fork.exists)
        if fork.owner == self._plane.own_rank:
            return self._owner.borrow(fork, sender) if fork.lent else self._owner.come_home(fork, sender)
        return self._users.receive(fork, sender, borrow)

    # Messages that may be lost

    def route_lost(self, route: object) -> None:
        for fork, passed in list(self.passed.items()):
            if passed.route is route:
                self._plane.post(passed.to, Operation(OperationKind.REVOKE, passed.source.rref, fork))

    def doubted(self, forks: Sequence[Fork]) -> None:
        for fork in forks:
            passed = self.passed.get(fork.fork)
            if passed is not None:
                self._plane.post(passed.to, Operation(OperationKind.REVOKE, fork.rref, fork.fork))

    def undelivered(self, forks: Sequence[Fork]) -> None:
        for fork in forks:
            self.release(fork.fork, listed=False)

    def revoke(self, rref: GlobalId, fork: GlobalId) -> bool:
        """REVOKE: whether the fork has arrived here. If not, it is refused from now on.

        A borrowed one is kept: the answer of its call, which would tell that it is gone, may not reach the sender.
        """
        reference = self._users.references.get(fork)
        if reference is not None:
            if reference.state is User.BORROWED:
                self._users.keep(reference)
            return True
        value = self._owner.values.get(rref)
        if value is not None and fork in value.accepts:
            return True
        self._revoked.add(fork)
        return False

    # What becomes of forks that this worker sent

    def on_accept(self, fork: GlobalId, orphans: bool) -> None:
        """ACCEPT: the receiver does not need this worker's reference any more."""
        if orphans:
            self._note_orphans(fork)
        self.release(fork, listed=True)

    def on_returned(self, receiver: int, fork: GlobalId, orphans: bool) -> None:
        """RETURN, by itself or with an answer: the receiver borrowed the fork, and has dropped it."""
        passed = self.passed.get(fork)
        if passed is not None and passed.to == receiver:
            if orphans:
                self._note_orphans(fork)
            self.release(fork, listed=False)

    def on_never_came(self, fork: GlobalId) -> None:
        """The receiver answers a REVOKE: it does not have the fork. It may have had it before, and passed it on."""
        self._note_orphans(fork)
        self.release(fork, listed=False)

    def release(self, fork: GlobalId, listed: bool) -> None:
        """A fork does not depend on its source any more: the owner lists it, or never will. If this is interrupted, it
        can be done again.
        """
        passed = self.passed.get(fork)
        if passed is None:
            return
        source = passed.source
        if isinstance(source, UserReference):
            source.children.discard(fork)
            self._users.release_if_free(source)
        elif not listed or passed.to == self._plane.own_rank:
            self._owner.unlist_fork(source, fork)
        self.passed.pop(fork, None)

    def _note_orphans(self, fork: GlobalId) -> None:
        """A fork will not be listed, and whoever had it may have passed it on."""
        passed = self.passed.get(fork)
        if passed is not None and isinstance(passed.source, UserReference):
            passed.source.orphans = passed.source.early

    # Deaths

    def forget_ids_of(self, peer: int) -> None:
        """A worker is dead: nothing that it sent will arrive, so its ids need not be kept."""
        self._revoked = {fork for fork in self._revoked if fork.created_on != peer}

    def on_death(self, peer: int) -> None:
        """Release the forks that were sent to a dead worker."""
        for fork in [fork for fork, passed in self.passed.items() if passed.to == peer]:
            self._note_orphans(fork)
            self.release(fork, listed=False)

    # Inspection

    @property
    def num_kept_ids(self) -> int:
        """Ids that are kept until the worker that made them dies."""
        return len(self._revoked)

    def concerns(self, peer: int) -> bool:
        return any(passed.to == peer for passed in self.passed.values())

    def validate(self) -> None:
        for fork, passed in self.passed.items():
            held = passed.source.children if isinstance(passed.source, UserReference) else passed.source.forks
            assert fork in held, "a fork on its way is not held"
            assert passed.to not in self._plane.dead
        for reference in self._users.references.values():
            assert all(self.passed[child].source is reference for child in reference.children)
