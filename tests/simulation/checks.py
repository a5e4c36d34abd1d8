"""What must hold after every event, and when everything is at rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farprop.protocol.references.control_plane import Batch, ControlReply, OperationKind
from farprop.protocol.references.records import UNCONFIRMED, OwnedValue, User, UserReference, Value
from tests.simulation.harness import Violation
from tests.simulation.ledger import ForkHistory, ValueHistory, show

if TYPE_CHECKING:
    from tests.simulation.network import Call
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

# After every event


def every_step(world: World) -> None:
    """Check the workers that this event touched: nothing else can have changed."""
    touched = world.touched
    for worker in world.live():
        if changed := worker.rank in touched:
            worker.state.validate()
        for reference in worker.state.users.values():
            if changed or reference.owner in touched:
                _has_its_value(world, worker, reference)
    for message in world.network.in_flight.values():
        for fork in message.forks:
            history = world.ledger.forks[fork.fork]
            if not history.revoked and (message.call.open or not fork.lent):
                _is_not_freed(world, history)


def _has_its_value(world: World, worker: Worker, reference: UserReference) -> None:
    """The owner lists a confirmed reference, and has the value of one that it will list."""
    found = world.workers[reference.owner].state.owned.get(reference.rref)
    arrived = reference.state in (User.BORROWED, User.ARRIVED, User.ARRIVED_DROPPED)
    if found is not None and (arrived or reference.fork in found.forks):
        return
    if reference.state is User.VOID or world.ledger.is_dead_to(worker.rank, reference.owner):
        return
    history = world.ledger.forks[reference.fork]
    if arrived:
        _is_not_freed(world, history)
    elif reference.exists or (history.value.came and not history.value.refused):
        raise Violation(f"{show(reference)} of worker {worker.rank} is not listed by its owner")


def _is_not_freed(world: World, history: ForkHistory) -> None:
    value = history.value
    if value.rref in world.workers[value.owner].state.owned or not value.came or value.refused:
        return
    if not world.ledger.excused(history) and not world.ledger.is_dead_to(history.holder, value.owner):
        raise Violation(f"value {show(value.rref)} is freed, but worker {history.holder} has or gets a reference")


# When something happens


def void(worker: Worker, reference: UserReference) -> None:
    """A reference became void, or arrived as void: there must be a reason."""
    ledger = worker.world.ledger
    history = ledger.forks[reference.fork]
    value = history.value
    if ledger.is_dead_to(worker.rank, value.owner) or history.revoked:
        return
    if reference.parent is None:
        if value.runs:
            raise Violation(f"{show(reference)} of worker {worker.rank} is void, but its function ran")
        value.never_came = True
        if value.recalled:
            return
    elif ledger.excused(history):
        return
    raise Violation(f"{show(reference)} of worker {worker.rank} is void for no reason")


def void_lent(worker: Worker, reference: UserReference, call: Call) -> None:
    """A reference that was lent for a call arrived as void: the caller must have given the call up, or be dead."""
    if call.open and not worker.world.ledger.is_dead_to(worker.rank, call.caller):
        raise Violation(f"{show(reference)}, lent for call {call} to worker {worker.rank}, is void for no reason")


def broken(worker: Worker, value: OwnedValue) -> None:
    """A value of this worker will never be made: its call is recalled, its creator gone, or nobody has it."""
    history = worker.world.ledger.values[value.rref]
    if history.recalled or worker.world.ledger.is_dead_to(worker.rank, history.creator):
        return
    if value.state is not Value.FREED or any(thing is value for thing in worker.everything()):
        raise Violation(f"{show(value)} of worker {worker.rank} is broken for no reason")


def made(worker: Worker, value: OwnedValue) -> None:
    """A call arrived that makes a value: references to it here must use this same record."""
    for thing in worker.everything():
        if isinstance(thing, OwnedValue) and thing.rref == value.rref and thing is not value:
            raise Violation(f"{show(value)} of worker {worker.rank} is there twice")


def runs(history: ValueHistory) -> None:
    """A function runs."""
    history.runs += 1
    if history.runs > 1:
        raise Violation(f"the function that makes value {show(history.rref)} runs again")
    if history.never_came:
        raise Violation(
            f"the function that makes value {show(history.rref)} runs, though its creator gave it up as lost"
        )


def replied(worker: Worker, batch: Batch, reply: ControlReply) -> None:
    """A batch was executed: an owner may refuse to list a fork only because of a death."""
    ledger = worker.world.ledger
    for operation, done in zip(batch.operations, reply.results, strict=False):
        if operation.kind is OperationKind.REGISTER and not done:
            history = ledger.forks[operation.fork]
            if not ledger.excused(history) and not ledger.is_dead_to(worker.rank, history.value.creator):
                raise Violation(f"worker {worker.rank} refuses {show(operation)}")


# At rest


def at_rest(world: World) -> None:
    """Nothing is on its way, so nothing may be undecided, and the owners must list exactly the forks that exist."""
    for worker in world.live():
        machine = worker.state
        who = f"at rest, worker {worker.rank}"
        if not machine.settled or machine.passed:
            raise Violation(f"{who} is not settled: {machine.counts()}")
        for reference in machine.users.values():
            if reference.state in UNCONFIRMED:
                raise Violation(f"{who} has {show(reference)}")
        for value in machine.owned.values():
            if value.state is Value.AWAITED:
                raise Violation(f"{who} waits for a call that makes {show(value)}")
            for fork, holder in value.forks.items():
                if fork not in world.workers[holder].state.users:
                    raise Violation(
                        f"{who} lists fork {show(fork)} of {show(value)}, which worker {holder} does not have"
                    )
        for fork in sorted(machine._owner._forgone):
            if world.ledger.forks[fork].value.came:
                raise Violation(f"{who} remembers that fork {show(fork)} is gone, though its call has arrived")


def nothing_left(world: World) -> None:
    """All programs have dropped everything, so nothing may be left."""
    at_rest(world)
    for worker in world.live():
        machine = worker.state
        if machine.owned or machine.users or machine.passed or any(machine.counts().values()):
            raise Violation(f"in the end, worker {worker.rank} still has {machine.counts()}")
        for peer in world.live():
            if machine.concerns(peer.rank):
                raise Violation(f"in the end, worker {worker.rank} is still concerned with worker {peer.rank}")
