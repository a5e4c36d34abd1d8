"""The user side: references of this worker to values of other workers.

A reference lives until the program has dropped it and the owner lists every fork made from it. Then the owner is told.
"""

from __future__ import annotations

from farprop.ids import GlobalId
from farprop.protocol.references.control_plane import ControlPlane, Operation, OperationKind
from farprop.protocol.references.records import (
    DROPPABLE,
    UNCONFIRMED,
    UNREGISTERED,
    Fork,
    InstructionKind,
    ReturnedFork,
    User,
    UserEvent,
    UserReference,
)


class UserSide:
    """The references of this worker, by fork, until they have ended."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.references: dict[GlobalId, UserReference] = {}
        # By dead owner: what was passed on before the owner was known to have a record of it.
        self._lost_early: dict[int, list[UserReference]] = {}

    # remote()

    def prepare(self, owner: int) -> UserReference:
        return UserReference(owner, self._plane.new_id(), self._plane.new_id(), None, User.CREATING, exists=False)

    def add(self, reference: UserReference) -> None:
        self.references[reference.fork] = reference
        if reference.owner in self._plane.dead:
            self.move(reference, UserEvent.OWNER_DIED)

    def made(self, reference: UserReference) -> None:
        if reference.state in (User.CREATING, User.CREATING_DROPPED):
            reference.exists = True
            self.move(reference, UserEvent.MADE)
        else:
            self.release_if_free(reference)  # the first attempt may have been interrupted

    def unanswered(self, reference: UserReference, lost: bool) -> None:
        if reference.state in (User.CREATING, User.CREATING_DROPPED):
            if lost:
                self._recall(reference)
            self.move(reference, UserEvent.UNANSWERED)

    def unsent(self, reference: UserReference) -> None:
        if reference.state in (User.CREATING, User.CREATING_DROPPED):
            if reference.early:  # its receivers may have made the owner wait for the call
                self._recall(reference)
            self.move(reference, UserEvent.UNSENT)

    def _recall(self, reference: UserReference) -> None:
        self._plane.post(reference.owner, Operation(OperationKind.RECALL, reference.rref, reference.fork))

    def on_never_came(self, fork: GlobalId) -> None:
        """The owner answers a RECALL: the call had not arrived, and will not be run."""
        reference = self.references.get(fork)
        if reference is not None and reference.state in (User.DOUBTFUL, User.DROPPED):
            self.move(reference, UserEvent.NEVER_CAME)

    # References that come in messages

    def receive(self, fork: Fork, sender: int, borrow: bool) -> UserReference:
        """Take a fork of another worker's value. One that the owner sent is listed there already."""
        from_owner = sender == fork.owner
        state = User.BORROWED if borrow else User.CONFIRMED if from_owner else User.ARRIVED
        reference = UserReference(fork.owner, fork.rref, fork.fork, sender, state, fork.exists)
        self.references[fork.fork] = reference
        if fork.owner in self._plane.dead:
            self.move(reference, UserEvent.OWNER_DIED)
        else:
            self._announce(reference)
        return reference

    def _announce(self, reference: UserReference) -> None:
        """Tell those who wait for it that a reference has arrived."""
        rref, fork = reference.rref, reference.fork
        if reference.state is User.CONFIRMED:
            self._plane.post(reference.owner, Operation(OperationKind.ACCEPT, rref, fork))
        elif reference.state is User.ARRIVED:
            self._plane.post(reference.owner, Operation(OperationKind.REGISTER, rref, fork, reference.exists))

    def give_up(self, fork: GlobalId) -> None:
        """Taking a fork out of a message was interrupted: if it is here, announce it in any case, and drop it."""
        reference = self.references.get(fork)
        if reference is not None and reference.state in DROPPABLE:
            self._announce(reference)  # to do so twice does no harm
            self.drop(reference)

    # Borrowed references

    def keep(self, reference: UserReference) -> None:
        """A reference that was borrowed outlives its call, or its sender may be gone before the call has ended.

        From now on it is as one that was not borrowed. To do this twice does no harm: the first time may have been
        interrupted.
        """
        if reference.state is User.BORROWED:
            self.move(reference, UserEvent.KEPT)
        if reference.state is not User.ARRIVED:
            return
        if reference.parent == reference.owner:
            self.move(reference, UserEvent.REGISTERED)  # it was listed before it was sent
        else:
            self._announce(reference)

    def give_back(self, reference: UserReference) -> ReturnedFork | None:
        """The program has dropped a borrowed reference, and the answer of the call can tell its sender.

        Returns:
            What to tell; None if the reference is not borrowed any more, or forks made from it depend on it.
        """
        if reference.state is not User.BORROWED or reference.children:
            return None
        self.references.pop(reference.fork, None)
        reference.move(UserEvent.DROP)
        return ReturnedFork(reference.fork, reference.orphans)

    def on_registered(self, fork: GlobalId, listed: bool) -> None:
        """The owner answers a REGISTER: it lists the fork, or does not have the value."""
        reference = self.references.get(fork)
        if reference is not None and reference.state in UNREGISTERED:
            reference.exists = reference.exists or listed
            self.move(reference, UserEvent.REGISTERED if listed else UserEvent.REFUSED)

    # The end

    def drop(self, reference: UserReference) -> None:
        """The program can't reach a reference any more."""
        if reference.state is User.BORROWED:
            if reference.children:
                self.keep(reference)
            elif reference.parent is not None:
                rref, fork, orphans = reference.rref, reference.fork, reference.orphans
                self._plane.post(reference.parent, Operation(OperationKind.RETURN, rref, fork, orphans))
        self.move(reference, UserEvent.DROP)

    def move(self, reference: UserReference, event: UserEvent) -> None:
        """Do an event's transition, and what follows from it."""
        before = reference.state
        reference.move(event)
        if before in UNREGISTERED and reference.state not in UNREGISTERED:
            self._plane.instruct(InstructionKind.SETTLED, reference)
            self._release_parent(reference, event)
        elif before is User.BORROWED and event is UserEvent.OWNER_DIED:
            self._release_parent(reference, event)
        if reference.state is User.CONFIRMED:
            self._plane.instruct(InstructionKind.CONFIRMED, reference)
        elif reference.state is User.VOID:
            self._plane.instruct(InstructionKind.VOID, reference)
        elif reference.state is User.DROPPED:
            self.release_if_free(reference)
        elif reference.state is User.ENDED:
            self.references.pop(reference.fork, None)

    def _release_parent(self, reference: UserReference, event: UserEvent) -> None:
        """Listed or not, the parent need not hold its own reference for this one any more."""
        if reference.parent is not None:
            orphans = reference.early and event is not UserEvent.REGISTERED
            accept = Operation(OperationKind.ACCEPT, reference.rref, reference.fork, orphans)
            self._plane.post(reference.parent, accept)

    def release_if_free(self, reference: UserReference) -> None:
        """End a dropped reference if no fork made from it depends on it."""
        if reference.state is User.DROPPED and not reference.children:
            kind = OperationKind.DELETE if reference.exists else OperationKind.FORGO
            gone = Operation(kind, reference.rref, reference.fork, reference.orphans)
            self._plane.post(reference.owner, gone)
            self.move(reference, UserEvent.CHILDREN_SAFE)

    def on_death(self, peer: int) -> None:
        """Void the references to values of a dead worker. Nobody holds those any more that were borrowed from it."""
        lost = [reference for reference in self.references.values() if reference.owner == peer and reference.early]
        if lost:
            self._lost_early[peer] = lost
        for reference in list(self.references.values()):
            if reference.owner == peer:
                if reference.state is not User.VOID:
                    self.move(reference, UserEvent.OWNER_DIED)
            elif reference.parent == peer and reference.state is User.BORROWED:
                self.keep(reference)

    def owner_replaced(self, peer: int) -> None:
        """Another process has the rank of a dead owner. Receivers of early forks may ask it for values whose calls went
        to the one before: it must not wait for them.
        """
        for reference in self._lost_early.pop(peer, ()):
            self._recall(reference)

    # Inspection

    @property
    def num_unconfirmed(self) -> int:
        return sum(reference.state in UNCONFIRMED for reference in self.references.values())

    def concerns(self, peer: int) -> bool:
        return any(
            reference.owner == peer or (reference.parent == peer and reference.state is User.BORROWED)
            for reference in self.references.values()
        )

    def validate(self) -> None:
        for fork, reference in self.references.items():
            assert fork == reference.fork
            assert reference.state is not User.ENDED
            assert reference.state is not User.DROPPED or reference.children, "dropped, free, and still here"
            assert reference.owner not in self._plane.dead or reference.state is User.VOID
            assert reference.parent not in self._plane.dead or reference.state is not User.BORROWED
