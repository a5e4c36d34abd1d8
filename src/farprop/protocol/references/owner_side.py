"""The owner side: values of this worker that other workers refer to, each with the list of its forks.

A value is freed when its list is empty. Forks may arrive before the call that makes the value: then it is *awaited*.
"""

from __future__ import annotations

from farprop.ids import GlobalId
from farprop.protocol.references.control_plane import ControlPlane, Operation, OperationKind
from farprop.protocol.references.records import (
    Fork,
    InstructionKind,
    OwnedValue,
    User,
    UserReference,
    Value,
    ValueEvent,
)


class OwnerSide:
    """The values of this worker, by rref, while another worker refers to them."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.values: dict[GlobalId, OwnedValue] = {}
        self._recalled: set[GlobalId] = set()  # rrefs whose calls must not run if they arrive after all
        self._forgone: set[GlobalId] = set()  # forks that ended before the call that carries them arrived
        self._orphaned: set[GlobalId] = set()  # rrefs of which unheld forks may arrive, because of a death
        self._freed_orphaned: set[GlobalId] = set()  # those of them that were made and freed

    # Values

    def own(self) -> OwnedValue:
        return OwnedValue(self._plane.new_id(), Value.FREED)

    def make(self, creator: int, rref: GlobalId, fork: GlobalId) -> OwnedValue | None:
        if rref in self._recalled or creator in self._plane.dead:
            self._forgone.discard(fork)
            return None
        value = self.values.get(rref)
        if value is None:
            value = OwnedValue(rref, Value.FREED)
        value.move(ValueEvent.CALL_CAME)
        self.values[rref] = value
        if fork in self._forgone:
            self._forgone.discard(fork)
        else:
            value.forks[fork] = creator
        self._accept_all(value)
        self._free_if_unused(value)
        return value

    def may_come(self, rref: GlobalId) -> bool:
        """Whether the call that makes a value that is not here may still arrive."""
        gone = rref in self._recalled or rref in self._freed_orphaned
        return not gone and rref.created_on not in self._plane.dead

    def _find_or_await(self, rref: GlobalId, exists: bool) -> OwnedValue | None:
        """The value; an awaited one if its call may still arrive; None if it was freed.

        Args:
            rref: The value's id.
            exists: Whether the sender of a fork knew that this worker had a record of the value.
        """
        value = self.values.get(rref)
        created_on = rref.created_on
        may_come = not exists and created_on != self._plane.own_rank and created_on not in self._plane.dead
        if value is None and may_come and rref not in self._freed_orphaned:
            value = self.values[rref] = OwnedValue(rref, Value.AWAITED)
            if rref in self._recalled:
                self._break(value)
        return value

    def _break(self, value: OwnedValue) -> None:
        """The value will never be made."""
        value.move(ValueEvent.CALL_LOST)
        self._plane.instruct(InstructionKind.BROKEN, value)
        self._accept_all(value)

    def _free_if_unused(self, value: OwnedValue) -> None:
        if value.forks or value.accepts:
            return
        if value.state is not Value.FREED:
            if value.state is Value.AWAITED:
                self._plane.instruct(InstructionKind.BROKEN, value)
            elif value.state is Value.MADE and value.rref in self._orphaned:
                self._freed_orphaned.add(value.rref)
            value.move(ValueEvent.LAST_GONE)
        elif value.rref not in self.values:
            return
        # From here on also if an earlier attempt was interrupted.
        self._plane.instruct(InstructionKind.FREED, value)
        self.values.pop(value.rref, None)

    # The list of forks

    def list_fork(self, value: OwnedValue, fork: GlobalId, holder: int) -> None:
        """List a fork that this worker is about to send."""
        if value.state is Value.FREED:
            value.move(ValueEvent.SHARED)
            self.values[value.rref] = value
        value.forks[fork] = holder

    def unlist_fork(self, value: OwnedValue, fork: GlobalId) -> None:
        """Remove a fork that this worker sent, and that will not be used."""
        value.forks.pop(fork, None)
        self._free_if_unused(value)

    def come_home(self, fork: Fork, sender: int) -> UserReference | OwnedValue:
        """Take a fork of a value of this worker: it becomes the value. A void reference if the value is gone."""
        value = self._find_or_await(fork.rref, fork.exists)
        if value is None:
            self._plane.post(sender, Operation(OperationKind.ACCEPT, fork.rref, fork.fork))
            return UserReference(fork.owner, fork.rref, fork.fork, sender, User.VOID, fork.exists)
        if value.state is Value.AWAITED:
            value.accepts[fork.fork] = sender
        else:
            self._plane.post(sender, Operation(OperationKind.ACCEPT, fork.rref, fork.fork))
            self._free_if_unused(value)
        return value

    def borrow(self, fork: Fork, sender: int) -> UserReference | OwnedValue:
        """Take a fork that the sender holds itself. A void reference if it does not: the call came too late."""
        value = self.values.get(fork.rref)
        if value is None or value.forks.get(fork.fork) != sender:
            return UserReference(fork.owner, fork.rref, fork.fork, sender, User.VOID, fork.exists)
        if value.state is Value.AWAITED:
            value.accepts[fork.fork] = sender  # keeps it awaited, though the sender may drop its own fork
        return value

    def find_lent(self, fork: Fork, sender: int) -> OwnedValue | None:
        """The value of a fork that ``borrow`` would take without changing anything."""
        value = self.values.get(fork.rref)
        if value is None or value.state is not Value.MADE or value.forks.get(fork.fork) != sender:
            return None
        return value

    def _accept_all(self, value: OwnedValue) -> None:
        """Release the parents of forks that came home before the value was made, or known to be lost."""
        accepts, value.accepts = value.accepts, {}
        for fork, parent in accepts.items():
            self._plane.post(parent, Operation(OperationKind.ACCEPT, value.rref, fork))

    # Operations that users ask for

    def register(self, holder: int, rref: GlobalId, fork: GlobalId, exists: bool) -> bool:
        """REGISTER: list a fork. False if the value is gone."""
        value = self._find_or_await(rref, exists)
        if value is None:
            return False
        value.forks[fork] = holder
        return True

    def delete(self, rref: GlobalId, fork: GlobalId, orphans: bool) -> bool:
        """DELETE: a listed fork has ended. Returns whether it was listed."""
        if orphans:
            self._orphaned.add(rref)
        value = self.values.get(rref)
        if value is None or value.forks.pop(fork, None) is None:
            return False
        self._free_if_unused(value)
        return True

    def forgo(self, rref: GlobalId, fork: GlobalId, orphans: bool) -> None:
        """FORGO: the creator's fork has ended, and its call may not have arrived yet."""
        if not self.delete(rref, fork, orphans) and rref not in self._recalled:
            self._forgone.add(fork)

    def recall(self, rref: GlobalId, fork: GlobalId) -> bool:
        """RECALL: whether the call that makes the value has arrived. If not, it will not run."""
        value = self.values.get(rref)
        if value is not None and fork in value.forks:
            return True
        self._recalled.add(rref)
        if value is not None and value.state is Value.AWAITED:
            self._break(value)
            self._free_if_unused(value)
        return False

    # Deaths

    def forget_ids_of(self, peer: int) -> None:
        """A worker is dead: nothing that it made will arrive, so its ids need not be kept."""
        self._recalled = {rref for rref in self._recalled if rref.created_on != peer}
        self._forgone = {fork for fork in self._forgone if fork.created_on != peer}
        self._orphaned = {rref for rref in self._orphaned if rref.created_on != peer}
        self._freed_orphaned = {rref for rref in self._freed_orphaned if rref.created_on != peer}

    def on_death(self, peer: int) -> None:
        """Remove the forks of a dead worker, and break the values whose calls it would have sent."""
        for value in list(self.values.values()):
            if peer in value.forks.values():
                value.forks = {fork: holder for fork, holder in value.forks.items() if holder != peer}
                if value.rref.created_on not in (self._plane.own_rank, peer):
                    self._orphaned.add(value.rref)
            if value.state is Value.AWAITED and value.rref.created_on == peer:
                self._break(value)
            self._free_if_unused(value)

    # Inspection

    @property
    def num_forks(self) -> int:
        return sum(len(value.forks) for value in self.values.values())

    @property
    def num_kept_ids(self) -> int:
        """Ids that are kept until the worker that made them dies."""
        return len(self._recalled) + len(self._forgone) + len(self._orphaned) + len(self._freed_orphaned)

    def concerns(self, peer: int) -> bool:
        return any(
            peer in value.forks.values() or peer in value.accepts.values() or value.rref.created_on == peer
            for value in self.values.values()
        )

    def validate(self) -> None:
        for rref, value in self.values.items():
            assert rref == value.rref
            assert value.state is not Value.FREED
            assert value.forks or value.accepts, "nobody refers to it, and it is still here"
            assert not value.accepts or value.state is Value.AWAITED
            assert not self._plane.dead.intersection(value.forks.values())
