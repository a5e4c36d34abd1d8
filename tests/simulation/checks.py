"""What must be true after every event, and when everything has come to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farprop.protocol.references.messages import Batch, Kind, Reply
from farprop.protocol.references.records import OwnedValue, UserReference
from farprop.protocol.references.states import UNCONFIRMED, User, Value
from tests.simulation.ledger import ForkStory, ValueStory, Violation
from tests.simulation.names import show

if TYPE_CHECKING:
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

# After every event


def every_step(world: World) -> None:
    """Only what this event had to do with can have changed."""
    touched = world.touched
    for worker in world.live():
        if changed := worker.rank in touched:
            worker.state.validate()
        for reference in worker.state.users.values():
            if changed or reference.owner in touched:
                _has_its_value(world, worker, reference)
    for letter in world.network.in_flight.values():
        for fork in letter.forks:
            story = world.ledger.forks[fork.fork]
            if not story.revoked:
                _is_not_freed(world, story)


def _has_its_value(world: World, worker: Worker, reference: UserReference) -> None:
    """A reference that the owner counts is counted there; one that it will count finds its value there."""
    found = world.workers[reference.owner].state.owned.get(reference.rref)
    arrived = reference.state is User.ARRIVED or reference.state is User.ARRIVED_DROPPED
    if found is not None and (arrived or reference.fork in found.forks):
        return
    if reference.state is User.VOID or world.ledger.parted(worker.rank, reference.owner):
        return
    story = world.ledger.forks[reference.fork]
    if arrived:
        _is_not_freed(world, story)
    elif reference.exists or (story.value.came and not story.value.refused):
        raise Violation(f"{show(reference)} of worker {worker.rank} is not counted by its owner")


def _is_not_freed(world: World, story: ForkStory) -> None:
    value = story.value
    if value.rref in world.workers[value.owner].state.owned or not value.came or value.refused:
        return
    if not world.ledger.excused(story) and not world.ledger.parted(story.holder, value.owner):
        raise Violation(f"value {show(value.rref)} is freed, but worker {story.holder} has or gets a reference")


# When something happens


def void(worker: Worker, reference: UserReference) -> None:
    """A reference became void, or came as void: there must be a reason."""
    ledger = worker.world.ledger
    story = ledger.forks[reference.fork]
    value = story.value
    if ledger.parted(worker.rank, value.owner) or story.revoked:
        return
    if reference.made_here:
        if value.runs:
            raise Violation(f"{show(reference)} of worker {worker.rank} is void, but its function ran")
        value.never_came = True
        if value.recalled:
            return
    elif ledger.excused(story):
        return
    raise Violation(f"{show(reference)} of worker {worker.rank} is void for no reason")


def broken(worker: Worker, value: OwnedValue) -> None:
    """A value of this worker will never be made: its call is recalled, its creator gone, or nobody has it."""
    story = worker.world.ledger.values[value.rref]
    if story.recalled or worker.world.ledger.parted(worker.rank, story.creator):
        return
    if value.state is not Value.FREED or any(thing is value for thing in worker.everything()):
        raise Violation(f"{show(value)} of worker {worker.rank} is broken for no reason")


def made(worker: Worker, value: OwnedValue) -> None:
    """A call came that makes a value: whoever has a reference to it here has this one."""
    for thing in worker.everything():
        if isinstance(thing, OwnedValue) and thing.rref == value.rref and thing is not value:
            raise Violation(f"{show(value)} of worker {worker.rank} is there twice")


def runs(story: ValueStory) -> None:
    """A function runs."""
    story.runs += 1
    if story.runs > 1:
        raise Violation(f"the function that makes value {show(story.rref)} runs again")
    if story.never_came:
        raise Violation(f"the function that makes value {show(story.rref)} runs, though its creator gave it up as lost")


def replied(worker: Worker, batch: Batch, reply: Reply) -> None:
    """A batch was done: an owner may refuse to count a fork only if somebody's death is to blame."""
    ledger = worker.world.ledger
    for operation, done in zip(batch.operations, reply.results, strict=False):
        if operation.kind is Kind.REGISTER and not done:
            story = ledger.forks[operation.fork]
            if not ledger.excused(story) and not ledger.parted(worker.rank, story.value.creator):
                raise Violation(f"worker {worker.rank} refuses {show(operation)}")


# At rest


def calm(world: World) -> None:
    """Nothing is on its way: nothing is undecided, and what the owners count is what there is."""
    for worker in world.live():
        machine = worker.state
        who = f"at rest, worker {worker.rank}"
        if worker.waiting:
            raise Violation(f"{who} has functions that wait for their arguments")
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
                    raise Violation(f"{who} counts fork {show(fork)} of {show(value)}, which worker {holder} has not")
        for fork in sorted(machine._forgone):
            if world.ledger.forks[fork].value.came:
                raise Violation(f"{who} remembers that fork {show(fork)} is gone, though its call has come")


def empty(world: World) -> None:
    """All programs have dropped everything: nothing is left."""
    calm(world)
    for worker in world.live():
        machine = worker.state
        if machine.owned or machine.users or machine.passed or any(machine.counts().values()):
            raise Violation(f"in the end, worker {worker.rank} still has {machine.counts()}")
        for peer in world.live():
            if machine.concerns(peer.rank):
                raise Violation(f"in the end, worker {worker.rank} is still concerned with worker {peer.rank}")


def kept_ids(worker: Worker) -> int:
    """How many ids of lost messages and orphans the worker keeps: the protocol never forgets them."""
    machine = worker.state
    kept = (machine._revoked, machine._recalled, machine._forgone, machine._orphaned, machine._gone)
    return sum(map(len, kept))
