"""The protocol of remote references, one event at a time: how it changes the state of each worker."""

from __future__ import annotations

import itertools

import pytest

from farprop.ids import GlobalId
from farprop.protocol.references.control_plane import (
    MAX_OPERATIONS,
    Batch,
    ControlReply,
    Operation,
    OperationKind,
    ReliableReceiver,
    ReliableSender,
)
from farprop.protocol.references.records import (
    USER_TABLE,
    VALUE_TABLE,
    InstructionKind,
    InvalidTransition,
    OwnedValue,
    ReturnedFork,
    User,
    UserEvent,
    UserReference,
    Value,
    ValueEvent,
)
from farprop.protocol.references.state_machine import RRefStateMachine

OWNER, ANN, BOB, EVE = range(4)
ROUTE = object()


class Job:
    """Four workers. ``exchange`` delivers their batches."""

    def __init__(self) -> None:
        self.machines = [RRefStateMachine(rank) for rank in range(4)]

    def __getitem__(self, rank: int) -> RRefStateMachine:
        return self.machines[rank]

    def exchange(self, *between: int) -> list[OperationKind]:
        """Deliver the batches of these workers, or of all, until none are left; returns the delivered operations."""
        ranks = between or range(4)
        carried: list[OperationKind] = []
        going = True
        while going:
            going = False
            for source in ranks:
                for target in ranks:
                    batch = self[source].outgoing(target)
                    if batch is not None and target not in self[source].dead:
                        carried += [operation.kind for operation in batch.operations]
                        self[source].replied(target, self[target].incoming(source, batch))
                        going = True
            for machine in self.machines:
                machine.validate()
        return carried

    def create(self, creator: int = ANN) -> tuple[UserReference, OwnedValue]:
        """A value that ``remote()`` made."""
        reference = self[creator].create(OWNER)
        value = self[OWNER].make(creator, reference.rref, reference.fork)
        assert value is not None
        self[creator].made(reference)
        return reference, value

    def send(self, source: UserReference | OwnedValue, sender: int, to: int) -> UserReference | OwnedValue:
        return self[to].arrive(self[sender].fork(source, to, ROUTE), sender)

    def kill(self, rank: int, *who_hear: int) -> None:
        for other in who_hear or set(range(4)) - {rank}:
            self[other].died(rank)

    def assert_nothing_left(self, *ranks: int) -> None:
        for rank in ranks or range(4):
            machine = self[rank]
            machine.validate()
            assert machine.settled
            assert not any(machine.counts().values()), f"worker {rank} has {machine.counts()}"


@pytest.fixture
def job() -> Job:
    return Job()


def as_user_reference(thing: UserReference | OwnedValue) -> UserReference:
    assert isinstance(thing, UserReference)
    return thing


def take_instructions(machine: RRefStateMachine) -> list[tuple[InstructionKind, object]]:
    instructions = [(kind, subject) for kind, subject in machine.instructions]
    machine.instructions.clear()
    return instructions


# The four ways to pass a reference


def test_remote_value_is_freed_when_its_reference_is_dropped(job: Job) -> None:
    reference, value = job.create()
    assert reference.state is User.CONFIRMED
    assert value.state is Value.MADE
    assert value.forks == {reference.fork: ANN}
    assert (InstructionKind.CONFIRMED, reference) in take_instructions(job[ANN])
    job[ANN].drop(reference)
    assert job.exchange() == [OperationKind.DELETE]
    assert (InstructionKind.FREED, value) in take_instructions(job[OWNER])
    job.assert_nothing_left()


def test_remote_reference_dropped_before_the_answer(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    job[ANN].drop(reference)
    assert not job.exchange()
    job[OWNER].make(ANN, reference.rref, reference.fork)
    job[ANN].made(reference)
    assert job.exchange() == [OperationKind.DELETE]
    job.assert_nothing_left()


def test_owner_passes_to_user(job: Job) -> None:
    value = job[OWNER].own()
    fork = job[OWNER].fork(value, ANN, ROUTE)
    assert value.forks == {fork.fork: ANN}, "counted before the message leaves"
    reference = as_user_reference(job[ANN].arrive(fork, OWNER))
    assert reference.state is User.CONFIRMED
    assert not job[OWNER].settled
    assert job.exchange() == [OperationKind.ACCEPT]
    assert job[OWNER].settled
    assert job[OWNER].find(value.rref) is value
    job[ANN].drop(reference)
    assert job.exchange() == [OperationKind.DELETE]
    job.assert_nothing_left()


def test_freed_value_can_be_shared_again(job: Job) -> None:
    value = job[OWNER].own()
    for _ in range(2):
        reference = as_user_reference(job.send(value, OWNER, ANN))
        assert value.state is Value.MADE
        job[ANN].drop(reference)
        job.exchange()
        assert value.state is Value.FREED


def test_user_passes_to_user(job: Job) -> None:
    parent, value = job.create()
    child = as_user_reference(job.send(parent, ANN, BOB))
    assert child.state is User.ARRIVED
    job[ANN].drop(parent)
    assert parent.state is User.DROPPED
    assert job[ANN].outgoing(OWNER) is None, "the parent holds its own until the child is counted"
    job.exchange(BOB, OWNER)
    assert child.state is User.CONFIRMED
    assert {InstructionKind.SETTLED, InstructionKind.CONFIRMED} <= {kind for kind, _ in take_instructions(job[BOB])}
    assert set(value.forks) == {parent.fork, child.fork}
    assert job.exchange() == [OperationKind.ACCEPT, OperationKind.DELETE]
    assert set(value.forks) == {child.fork}
    job[BOB].drop(child)
    job.exchange()
    job.assert_nothing_left()


def test_reference_dropped_before_it_is_registered(job: Job) -> None:
    parent, _ = job.create()
    child = as_user_reference(job.send(parent, ANN, BOB))
    job[BOB].drop(child)
    assert child.state is User.ARRIVED_DROPPED
    job[ANN].drop(parent)
    assert sorted(job.exchange()) == sorted(
        [OperationKind.REGISTER, OperationKind.ACCEPT, OperationKind.DELETE, OperationKind.DELETE]
    )
    job.assert_nothing_left()


def test_reference_passed_on_before_it_is_registered(job: Job) -> None:
    first, value = job.create()
    second = as_user_reference(job.send(first, ANN, BOB))
    third = as_user_reference(job.send(second, BOB, EVE))
    job[ANN].drop(first)
    job[BOB].drop(second)
    job.exchange()
    assert third.state is User.CONFIRMED
    assert value.forks == {third.fork: EVE}


def test_user_lends_to_owner(job: Job) -> None:
    value = job[OWNER].own()
    fork = job[OWNER].fork(value, ANN, ROUTE)
    reference = job[ANN].arrive(fork, OWNER)
    assert isinstance(reference, UserReference)
    job.exchange()
    lent = job[ANN].lend(reference, OWNER)
    assert lent is not None
    assert lent.lent
    assert job[OWNER].find_lent(lent, ANN) is job[OWNER].arrive(lent, ANN) is value
    assert job.exchange() == []
    assert job[OWNER].find_lent(fork, ANN) is None
    assert job[OWNER].find_lent(lent, BOB) is None
    # From somebody who does not hold it, or after it was dropped, it is void.
    assert as_user_reference(job[OWNER].arrive(lent, BOB)).state is User.VOID
    job[ANN].drop(reference)
    assert job.exchange() == [OperationKind.DELETE]
    assert job[OWNER].find_lent(lent, ANN) is None
    assert as_user_reference(job[OWNER].arrive(lent, ANN)).state is User.VOID


def test_only_a_listed_reference_is_lent_and_only_to_its_owner(job: Job) -> None:
    creating = job[ANN].create(OWNER)
    assert job[ANN].lend(creating, OWNER) is None
    assert job[OWNER].make(ANN, creating.rref, creating.fork) is not None
    job[ANN].made(creating)
    assert job[ANN].lend(creating, OWNER) is not None
    assert job[ANN].lend(creating, BOB) is None
    assert job[OWNER].lend(job[OWNER].own(), ANN) is None


def test_lent_reference_keeps_an_awaited_value(job: Job) -> None:
    """Bob registers a reference before the call that makes its value arrives, lends it to the owner, and drops it."""
    creating = job[ANN].create(OWNER)
    reference = job[BOB].arrive(job[ANN].fork(creating, BOB, ROUTE), ANN)
    assert isinstance(reference, UserReference)
    job.exchange()
    lent = job[BOB].lend(reference, OWNER)
    assert lent is not None
    assert job[OWNER].find_lent(lent, BOB) is None
    value = job[OWNER].arrive(lent, BOB)
    assert isinstance(value, OwnedValue)
    job[BOB].drop(reference)
    job.exchange()
    assert value.state is Value.AWAITED
    assert job[OWNER].make(ANN, creating.rref, creating.fork) is value
    assert value.state is Value.MADE
    job.exchange()


def test_user_passes_to_owner(job: Job) -> None:
    reference, value = job.create()
    assert job.send(reference, ANN, OWNER) is value
    assert job.exchange() == [OperationKind.ACCEPT]
    assert value.forks == {reference.fork: ANN}, "what comes home is not counted"


@pytest.mark.parametrize("own", [True, False])
def test_worker_passes_to_itself(job: Job, own: bool) -> None:
    reference, value = job.create()
    if own:
        assert job.send(value, OWNER, OWNER) is value
        assert set(value.forks) == {reference.fork}
    else:
        again = as_user_reference(job.send(reference, ANN, ANN))
        job.exchange()
        assert set(value.forks) == {reference.fork, again.fork}
        job[ANN].drop(again)
    job[ANN].drop(reference)
    job.exchange()
    job.assert_nothing_left()


def test_undelivered_forks_are_released(job: Job) -> None:
    reference, value = job.create()
    forks = [job[ANN].fork(reference, BOB, ROUTE)]
    job[ANN].drop(reference)
    job[ANN].undelivered(forks)
    own_forks = [job[OWNER].fork(value, BOB, ROUTE)]
    job[OWNER].undelivered(own_forks)
    job.exchange()
    job.assert_nothing_left()


# References that overtake the call that makes their value


def test_fork_overtakes_the_call_that_makes_its_value(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    child = as_user_reference(job.send(reference, ANN, BOB))
    job.exchange()
    value = job[OWNER].find(reference.rref)
    assert value is not None
    assert value.state is Value.AWAITED
    assert child.state is User.CONFIRMED
    assert job[OWNER].make(ANN, reference.rref, reference.fork) is value
    assert value.state is Value.MADE
    assert value.forks == {child.fork: BOB, reference.fork: ANN}


def test_fork_sent_to_the_owner_overtakes_the_call(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    value = job.send(reference, ANN, OWNER)
    assert isinstance(value, OwnedValue)
    assert value.state is Value.AWAITED
    assert not job.exchange(), "accepted only when the call has come: until then nobody else counts"
    assert job[OWNER].make(ANN, reference.rref, reference.fork) is value
    assert job.exchange() == [OperationKind.ACCEPT]


def test_awaited_value_without_references_breaks(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    child = as_user_reference(job.send(reference, ANN, BOB))
    job.exchange()
    job[BOB].drop(child)
    job.exchange()
    assert job[OWNER].find(reference.rref) is None
    assert InstructionKind.BROKEN in [kind for kind, _ in take_instructions(job[OWNER])]
    value = job[OWNER].make(ANN, reference.rref, reference.fork)
    assert value is not None
    assert value.forks == {reference.fork: ANN}


def test_awaited_value_breaks_when_its_creator_dies(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    child = as_user_reference(job.send(reference, ANN, BOB))
    value = job.send(reference, ANN, OWNER)
    job.exchange()
    job.kill(ANN)
    assert value.state is Value.BROKEN
    assert (InstructionKind.BROKEN, value) in take_instructions(job[OWNER])
    job[BOB].drop(child)
    job.exchange(OWNER, BOB, EVE)
    job.assert_nothing_left(OWNER, BOB, EVE)


def test_awaited_value_outlives_the_user_that_passed_it_to_the_owner(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    child = as_user_reference(job.send(reference, ANN, BOB))
    value = job.send(child, BOB, OWNER)
    job.kill(BOB)
    assert job[OWNER].make(ANN, reference.rref, reference.fork) is value
    assert value.state is Value.MADE


# Calls without answers


def test_doubtful_reference_is_dropped_before_the_call_arrives(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    job[ANN].unanswered(reference, lost=False)
    assert reference.state is User.DOUBTFUL
    job[ANN].drop(reference)
    assert job.exchange() == [OperationKind.FORGO]
    value = job[OWNER].make(ANN, reference.rref, reference.fork)
    assert value is not None, "the call is run all the same"
    assert value.state is Value.FREED
    assert not job[OWNER].num_kept_ids
    job[ANN].made(reference)
    assert reference.state is User.ENDED
    job.assert_nothing_left()


def test_doubtful_reference_is_dropped_after_the_call_arrived(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    assert job[OWNER].make(ANN, reference.rref, reference.fork) is not None
    job[ANN].unanswered(reference, lost=True)
    assert job.exchange() == [OperationKind.RECALL]
    assert reference.state is User.DOUBTFUL
    job[ANN].drop(reference)
    assert job.exchange() == [OperationKind.FORGO]
    job.assert_nothing_left()


@pytest.mark.parametrize("dropped", [False, True])
def test_recalled_call_is_not_run_if_it_still_arrives(job: Job, dropped: bool) -> None:
    reference = job[ANN].create(OWNER)
    job[ANN].unanswered(reference, lost=True)
    if dropped:
        job[ANN].drop(reference)
    job.exchange()
    assert reference.state is (User.ENDED if dropped else User.VOID)
    assert job[OWNER].make(ANN, reference.rref, reference.fork) is None
    if not dropped:
        job[ANN].drop(reference)
    job.assert_nothing_left()


def test_value_of_a_lost_call_breaks_for_its_users(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    child = as_user_reference(job.send(reference, ANN, BOB))
    job.exchange()
    value = job[OWNER].find(reference.rref)
    assert value is not None
    job[ANN].unanswered(reference, lost=True)
    job.exchange()
    assert value.state is Value.BROKEN
    job[BOB].drop(child)
    job[ANN].drop(reference)
    job.exchange()
    job.assert_nothing_left()


def test_reference_to_a_lost_call_that_reaches_the_owner_leaves_nothing(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    fork = job[ANN].fork(reference, OWNER, ROUTE)
    job[ANN].unanswered(reference, lost=True)
    job.exchange()
    value = job[OWNER].arrive(fork, ANN)
    assert (InstructionKind.BROKEN, value) in take_instructions(job[OWNER])
    job[ANN].drop(reference)
    job.exchange()
    job.assert_nothing_left()


def test_reference_of_an_unsent_call_is_void(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    job[ANN].unsent(reference)
    assert reference.state is User.VOID
    assert not job.exchange(), "nobody else knows of it"
    job[ANN].drop(reference)
    job.assert_nothing_left()


def test_awaited_value_of_an_unsent_call_breaks(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    child = as_user_reference(job.send(reference, ANN, BOB))
    job.exchange()
    job[ANN].unsent(reference)
    job.exchange()
    value = job[OWNER].find(reference.rref)
    assert value is not None
    assert value.state is Value.BROKEN
    job[BOB].drop(child)
    job[ANN].drop(reference)
    job.exchange()
    job.assert_nothing_left()


def test_awaited_value_breaks_whose_call_went_to_an_earlier_process(job: Job) -> None:
    """BOB gets the reference after another process has taken OWNER's place; ANN sent it before she knew of that."""
    reference = job[ANN].create(OWNER)
    fork = job[ANN].fork(reference, BOB, ROUTE)
    job[ANN].drop(reference)
    job.machines[OWNER] = RRefStateMachine(OWNER, itertools.count(1000))
    child = as_user_reference(job[BOB].arrive(fork, ANN))
    job.exchange(OWNER, BOB)
    value = job[OWNER].find(reference.rref)
    assert value is not None
    assert value.state is Value.AWAITED
    job[ANN].died(OWNER)
    job[ANN].replaced(OWNER)
    job.exchange()
    assert value.state is Value.BROKEN
    job[BOB].drop(child)
    job.exchange()
    job.assert_nothing_left()


# Connections that break


def test_lost_fork_is_revoked(job: Job) -> None:
    reference, value = job.create()
    lost = job[ANN].fork(reference, BOB, ROUTE)
    other = job[ANN].fork(reference, EVE, object())
    job[ANN].route_lost(ROUTE)
    assert job.exchange() == [OperationKind.REVOKE], "only what was on that connection"
    assert reference.children == {other.fork}
    void = as_user_reference(job[BOB].arrive(lost, ANN))
    assert void.state is User.VOID
    assert void.fork not in job[BOB].users
    job[BOB].drop(void)
    assert set(value.forks) == {reference.fork}


def test_lost_fork_of_the_owner_is_not_listed(job: Job) -> None:
    value = job[OWNER].own()
    job[OWNER].fork(value, BOB, ROUTE)
    job[OWNER].route_lost(ROUTE)
    job.exchange()
    assert value.state is Value.FREED
    job.assert_nothing_left()


@pytest.mark.parametrize("to", [BOB, OWNER])
def test_fork_that_arrived_before_its_connection_broke_is_kept(job: Job, to: int) -> None:
    reference = job[ANN].create(OWNER)
    thing = job.send(reference, ANN, to)
    job[ANN].route_lost(ROUTE)
    job.exchange(ANN, to)
    assert reference.children, "it is held until it is accepted"
    assert job[OWNER].make(ANN, reference.rref, reference.fork) is not None
    job.exchange()
    assert not reference.children
    assert thing.state in (User.CONFIRMED, Value.MADE)


# Deaths


def test_forks_of_a_dead_user_are_released(job: Job) -> None:
    reference, value = job.create()
    job.send(reference, ANN, BOB)
    job.exchange()
    job.kill(BOB)
    assert value.forks == {reference.fork: ANN}
    job.kill(ANN, OWNER)
    assert (InstructionKind.FREED, value) in take_instructions(job[OWNER])
    job.assert_nothing_left(OWNER, EVE)


def test_references_to_a_dead_owner_are_void(job: Job) -> None:
    confirmed, _ = job.create(ANN)
    creating = job[ANN].create(OWNER)
    doubtful = job[ANN].create(OWNER)
    job[ANN].unanswered(doubtful, lost=True)
    arrived = as_user_reference(job.send(confirmed, ANN, BOB))
    job.kill(OWNER)
    heard = take_instructions(job[ANN])
    for reference in (confirmed, creating, doubtful):
        assert reference.state is User.VOID
        assert (InstructionKind.VOID, reference) in heard
    assert arrived.state is User.VOID
    assert job[ANN].create(OWNER).state is User.VOID
    assert as_user_reference(job.send(confirmed, ANN, EVE)).state is User.VOID
    assert job.exchange(ANN, BOB, EVE) == [OperationKind.ACCEPT, OperationKind.ACCEPT]
    for machine in job.machines[1:]:
        for reference in list(machine.users.values()):
            machine.drop(reference)
    job.assert_nothing_left(ANN, BOB, EVE)


def test_forks_sent_to_a_dead_worker_are_released(job: Job) -> None:
    reference, value = job.create()
    job[ANN].fork(reference, BOB, ROUTE)
    job[OWNER].fork(value, BOB, ROUTE)
    job[ANN].drop(reference)
    job.kill(BOB)
    job[OWNER].fork(value, BOB, ROUTE)
    job.exchange(OWNER, ANN, EVE)
    job.assert_nothing_left(OWNER, ANN, EVE)


def test_call_of_a_dead_worker_is_not_run(job: Job) -> None:
    reference = job[ANN].create(OWNER)
    job.kill(ANN)
    assert job[OWNER].make(ANN, reference.rref, reference.fork) is None
    job.assert_nothing_left(OWNER)


def test_fork_of_a_dead_parent_is_void_if_it_arrives_too_late(job: Job) -> None:
    first, _ = job.create()
    second = as_user_reference(job.send(first, ANN, BOB))
    job.exchange()
    fork = job[BOB].fork(second, EVE, ROUTE)
    job[ANN].drop(first)
    job.kill(BOB, OWNER, ANN)
    job.exchange(OWNER, ANN)
    third = as_user_reference(job[EVE].arrive(fork, BOB))
    fourth = as_user_reference(job.send(third, EVE, ANN))
    job.exchange(OWNER, ANN, EVE)
    assert third.state is fourth.state is User.VOID
    assert not job[EVE].passed, "it need not hold its own for one that is refused"


@pytest.mark.parametrize("counted", [False, True])
def test_orphaned_fork_of_a_freed_value_is_void(job: Job, counted: bool) -> None:
    """The reference was passed on before the value was made, so its fork does not say that it exists. Then BOB dies."""
    first = job[ANN].create(OWNER)
    second = as_user_reference(job.send(first, ANN, BOB))
    fork = job[BOB].fork(second, EVE, ROUTE)
    assert not fork.exists
    assert job[OWNER].make(ANN, first.rref, first.fork) is not None
    job[ANN].made(first)
    if counted:
        job.exchange(OWNER, ANN, BOB)
    job[ANN].drop(first)
    job.exchange(OWNER, ANN)
    job.kill(BOB, OWNER, ANN)
    job.exchange(OWNER, ANN)
    third = as_user_reference(job[EVE].arrive(fork, BOB))
    job.exchange(OWNER, EVE)
    assert third.state is User.VOID
    job.assert_nothing_left(OWNER, ANN)


def test_orphaned_fork_of_a_user_that_believes_the_owner_dead_is_void(job: Job) -> None:
    first = job[ANN].create(OWNER)
    second = as_user_reference(job.send(first, ANN, BOB))
    fork = job[BOB].fork(second, EVE, ROUTE)
    assert job[OWNER].make(ANN, first.rref, first.fork) is not None
    job[ANN].made(first)
    job[ANN].drop(first)
    job.kill(OWNER, BOB)
    job.exchange(ANN, BOB)
    job.exchange(ANN, OWNER)
    third = as_user_reference(job[EVE].arrive(fork, BOB))
    job.exchange(OWNER, EVE)
    assert third.state is User.VOID


def test_orphaned_fork_of_a_reference_that_ended_before_its_revocation_is_void(job: Job) -> None:
    first = job[ANN].create(OWNER)
    second = as_user_reference(job.send(first, ANN, BOB))
    fork = job[BOB].fork(second, EVE, ROUTE)
    assert job[OWNER].make(ANN, first.rref, first.fork) is not None
    job[ANN].made(first)
    job[ANN].drop(first)
    job.kill(OWNER, BOB)
    job[BOB].drop(second)
    assert second.state is User.ENDED
    job[ANN].route_lost(ROUTE)
    revoke = job[ANN].outgoing(BOB)
    assert revoke is not None
    job[ANN].replied(BOB, job[BOB].incoming(ANN, revoke))
    assert job.exchange(ANN, OWNER) == [OperationKind.DELETE], "it did not wait for the ACCEPT, which is on its way"
    third = as_user_reference(job[EVE].arrive(fork, BOB))
    job.exchange(OWNER, EVE)
    assert third.state is User.VOID


@pytest.mark.parametrize("came", [False, True])
def test_fork_in_doubt_counts_only_if_it_arrived(job: Job, came: bool) -> None:
    reference, value = job.create()
    fork = job[ANN].fork(reference, BOB, ROUTE)
    if came:
        job[BOB].arrive(fork, ANN)
    job[ANN].doubted([fork])
    job.exchange()
    assert job[ANN].settled
    assert (fork.fork in value.forks) == came


def test_fork_in_doubt_to_the_same_worker_is_void(job: Job) -> None:
    reference, value = job.create()
    fork = job[ANN].fork(reference, ANN, None)
    job[ANN].doubted([fork])
    assert job[ANN].settled
    assert as_user_reference(job[ANN].arrive(fork, ANN)).state is User.VOID
    assert set(value.forks) == {reference.fork}


def test_second_report_of_a_death_does_nothing(job: Job) -> None:
    value = job[OWNER].own()
    job.send(value, OWNER, BOB)
    job[OWNER].died(BOB)
    take_instructions(job[OWNER])
    job[OWNER].died(BOB)
    assert not job[OWNER].instructions


# Instructions and counts


def test_register_is_sent_at_once_and_delete_later(job: Job) -> None:
    reference, _ = job.create()
    job[ANN].instructions.clear()
    job.send(reference, ANN, BOB)
    assert take_instructions(job[BOB]) == [(InstructionKind.SEND, OWNER)]
    job.exchange()
    job[ANN].instructions.clear()
    job[ANN].drop(reference)
    assert take_instructions(job[ANN]) == [(InstructionKind.SEND_LATER, OWNER)]


def test_operations_added_while_a_batch_is_in_flight_go_into_the_next(job: Job) -> None:
    reference, _ = job.create()
    again = job.create()[0]
    job[ANN].drop(reference)
    batch = job[ANN].outgoing(OWNER)
    assert batch is not None
    job[ANN].drop(again)
    assert job[ANN].outgoing(OWNER) is batch
    reply = job[OWNER].incoming(ANN, batch)
    job[ANN].instructions.clear()
    job[ANN].replied(OWNER, reply)
    assert take_instructions(job[ANN]) == [(InstructionKind.SEND, OWNER)]
    job[ANN].replied(OWNER, reply)
    assert not job[ANN].instructions, "a reply that comes again is not news"
    following = job[ANN].outgoing(OWNER)
    assert following is not None
    assert following.number == batch.number + 1


def test_counts_and_concerned_workers(job: Job) -> None:
    reference, value = job.create()
    job.send(reference, ANN, BOB)
    assert job[BOB].counts() == {
        "num_owner_rrefs": 0,
        "num_forks": 0,
        "num_pending_users": 1,
        "num_users": 1,
        "num_pending_forks": 0,
        "num_pending_operations": 1,
    }
    assert job[ANN].counts()["num_pending_forks"] == 1
    assert job[OWNER].counts()["num_forks"] == 1
    assert not job[BOB].settled
    concerned = {rank: [r for r in range(4) if job[rank].concerns(r)] for rank in range(4)}
    assert concerned == {OWNER: [ANN], ANN: [OWNER, BOB], BOB: [OWNER], EVE: []}
    assert value.forks


# Borrowed references


def lend(job: Job, source: UserReference | OwnedValue, sender: int, to: int) -> UserReference:
    """Send a reference in a request."""
    return as_user_reference(job[to].arrive(job[sender].fork(source, to, ROUTE), sender, borrow=True))


def give_back(job: Job, reference: UserReference, holder: int, to: int) -> None:
    returned = job[holder].give_back(reference)
    assert returned is not None
    job[to].returned(holder, [returned])


def test_borrowed_from_a_user_and_given_back(job: Job) -> None:
    parent, value = job.create()
    child = lend(job, parent, ANN, BOB)
    assert child.state is User.BORROWED
    job[ANN].drop(parent)
    assert not job.exchange(), "the parent is held, and nobody is told anything"
    assert value.forks == {parent.fork: ANN}
    give_back(job, child, BOB, ANN)
    assert job.exchange() == [OperationKind.DELETE]
    job.assert_nothing_left()


def test_borrowed_from_the_owner_and_given_back(job: Job) -> None:
    value = job[OWNER].own()
    child = lend(job, value, OWNER, ANN)
    assert value.forks == {child.fork: ANN}
    give_back(job, child, ANN, OWNER)
    assert value.state is Value.FREED
    assert not job.exchange()
    job.assert_nothing_left()


def test_borrowed_and_kept(job: Job) -> None:
    parent, value = job.create()
    child = lend(job, parent, ANN, BOB)
    job[BOB].keep(child)
    assert child.state is User.ARRIVED
    assert job[BOB].give_back(child) is None
    job[BOB].keep(child)  # again: the first time may have been interrupted
    assert job.exchange() == [OperationKind.REGISTER, OperationKind.REGISTER, OperationKind.ACCEPT]
    assert value.forks == {parent.fork: ANN, child.fork: BOB}
    job[ANN].drop(parent)
    job[BOB].drop(child)
    job.exchange()
    job.assert_nothing_left()


def test_borrowed_from_the_owner_and_kept(job: Job) -> None:
    value = job[OWNER].own()
    child = lend(job, value, OWNER, ANN)
    job[ANN].keep(child)
    assert child.state is User.CONFIRMED
    assert job.exchange() == [OperationKind.ACCEPT]
    job[ANN].drop(child)
    assert job.exchange() == [OperationKind.DELETE]
    job.assert_nothing_left()


@pytest.mark.parametrize("from_owner", [False, True])
def test_borrowed_and_dropped_without_an_answer(job: Job, from_owner: bool) -> None:
    parent, value = job.create()
    child = lend(job, value, OWNER, BOB) if from_owner else lend(job, parent, ANN, BOB)
    job[BOB].drop(child)
    assert job.exchange() == [OperationKind.RETURN]
    assert value.forks == {parent.fork: ANN}
    assert job[OWNER].settled
    assert job[ANN].settled


def test_borrowed_and_not_returned_with_the_answer(job: Job) -> None:
    parent, _ = job.create()
    child = lend(job, parent, ANN, BOB)
    returned = job[BOB].give_back(child)
    assert returned is not None
    job[BOB].not_returned(ANN, [returned])
    assert job.exchange() == [OperationKind.RETURN]
    job[ANN].returned(BOB, [returned])  # the answer arrived after all
    assert not parent.children
    assert job[ANN].settled


def test_only_the_receiver_can_return_a_fork(job: Job) -> None:
    parent, _ = job.create()
    child = lend(job, parent, ANN, BOB)
    forged = ReturnedFork(child.fork, orphans=False)
    job[ANN].returned(EVE, [forged, ReturnedFork(GlobalId(9, 9), orphans=True)])
    job[ANN].incoming(EVE, Batch(1, (Operation(OperationKind.RETURN, child.rref, child.fork),)))
    assert parent.children == {child.fork}
    job[ANN].returned(BOB, [forged])
    assert not parent.children


def test_borrowed_and_passed_on_is_not_given_back(job: Job) -> None:
    parent, value = job.create()
    child = lend(job, parent, ANN, BOB)
    grandchild = lend(job, child, BOB, EVE)
    assert job[BOB].give_back(child) is None
    job[BOB].drop(child)
    assert child.state is User.ARRIVED_DROPPED
    assert job.exchange() == [OperationKind.REGISTER, OperationKind.ACCEPT]
    give_back(job, grandchild, EVE, BOB)
    assert job.exchange() == [OperationKind.DELETE]
    assert value.forks == {parent.fork: ANN}


def test_borrowed_through_a_chain(job: Job) -> None:
    parent, _ = job.create()
    child = lend(job, parent, ANN, BOB)
    grandchild = lend(job, child, BOB, EVE)
    job[ANN].drop(parent)
    give_back(job, grandchild, EVE, BOB)
    give_back(job, child, BOB, ANN)
    assert job.exchange() == [OperationKind.DELETE]
    job.assert_nothing_left()


def test_borrowed_from_the_owner_and_lent_to_it(job: Job) -> None:
    parent, value = job.create()
    child = lend(job, value, OWNER, ANN)
    lent = job[ANN].lend(child, OWNER)
    assert lent is not None
    assert job[OWNER].arrive(lent, ANN, borrow=True) is value
    other = lend(job, parent, ANN, BOB)
    assert job[BOB].lend(other, OWNER) is None, "the owner does not list it"


def test_the_sender_of_a_borrowed_reference_dies(job: Job) -> None:
    parent, value = job.create()
    other = lend(job, value, OWNER, EVE)
    child = lend(job, parent, ANN, BOB)
    job.kill(ANN)
    assert child.state is User.ARRIVED
    assert job.exchange(OWNER, BOB, EVE) == [OperationKind.REGISTER]
    assert child.state is User.CONFIRMED
    assert value.forks == {child.fork: BOB, other.fork: EVE}


def test_the_owner_of_a_borrowed_reference_dies(job: Job) -> None:
    parent, _ = job.create()
    child = lend(job, parent, ANN, BOB)
    job.kill(OWNER)
    assert child.state is parent.state is User.VOID
    assert job.exchange(ANN, BOB) == [OperationKind.ACCEPT]
    assert not parent.children


@pytest.mark.parametrize("given_back", [False, True])
def test_connection_breaks_while_a_reference_is_borrowed(job: Job, given_back: bool) -> None:
    """The sender asks before the answer is sent, or after it was and got lost."""
    parent, _ = job.create()
    child = lend(job, parent, ANN, BOB)
    if given_back:
        assert job[BOB].give_back(child) is not None
    job[ANN].route_lost(ROUTE)
    carried = job.exchange()
    if given_back:
        assert carried == [OperationKind.REVOKE]
    else:
        assert carried == [OperationKind.REVOKE, OperationKind.REGISTER, OperationKind.ACCEPT]
        assert child.state is User.CONFIRMED
    assert not parent.children


def test_taking_a_borrowed_reference_is_interrupted(job: Job) -> None:
    parent, _ = job.create()
    fork = job[ANN].fork(parent, BOB, ROUTE)
    job[BOB].arrive(fork, ANN, borrow=True)
    job[BOB].give_up([fork])
    assert job.exchange() == [OperationKind.RETURN]
    assert not parent.children
    assert job[BOB].settled


# The tables


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in User for e in UserEvent if (s, e) not in USER_TABLE])
def test_invalid_transition_of_a_reference_raises(state: User, event: UserEvent) -> None:
    reference = UserReference(
        OWNER, RRefStateMachine(ANN).new_id(), RRefStateMachine(BOB).new_id(), ANN, state, exists=True
    )
    with pytest.raises(InvalidTransition, match=f"{state.name}, which can't have the event {event.name}"):
        reference.move(event)


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in Value for e in ValueEvent if (s, e) not in VALUE_TABLE])
def test_invalid_transition_of_a_value_raises(state: Value, event: ValueEvent) -> None:
    with pytest.raises(InvalidTransition, match=f"{state.name}, which can't have the event {event.name}"):
        OwnedValue(RRefStateMachine(OWNER).new_id(), state).move(event)


def test_every_state_can_be_reached() -> None:
    assert {User.CREATING, User.BORROWED, *USER_TABLE.values()} == set(User)
    assert {Value.AWAITED, *VALUE_TABLE.values()} == set(Value)


def test_validate_detects_inconsistent_state(job: Job) -> None:
    reference, value = job.create()
    job.send(reference, ANN, BOB)
    del job[ANN].passed[next(iter(reference.children))]
    with pytest.raises(KeyError):
        job[ANN].validate()
    value.forks.clear()
    with pytest.raises(AssertionError, match="nobody refers to it"):
        job[OWNER].validate()


# Batches


def operation(number: int) -> Operation:
    return Operation(OperationKind.DELETE, GlobalId(1, number), GlobalId(2, number))


def _replied(outbox: ReliableSender, reply: ControlReply) -> Batch | None:
    """Take a reply, and its results."""
    batch = outbox.batch_of(reply)
    if batch is not None:
        outbox.forget(batch)
    return batch


def test_one_batch_at_a_time() -> None:
    outbox = ReliableSender()
    assert outbox.current() is None
    assert outbox.empty
    outbox.add(operation(1))
    assert not outbox.empty
    batch = outbox.current()
    assert batch == Batch(1, (operation(1),))
    outbox.add(operation(2))
    assert outbox.current() is batch
    assert outbox.operations() == [operation(1), operation(2)]
    assert _replied(outbox, ControlReply(1, b"\1")) is batch
    assert outbox.current() == Batch(2, (operation(2),))
    assert _replied(outbox, ControlReply(2, b"\0")) == Batch(2, (operation(2),))
    assert outbox.empty
    outbox.add(operation(3))
    assert outbox.current() == Batch(3, (operation(3),)), "numbers go on"


def test_unexpected_replies_are_ignored() -> None:
    outbox = ReliableSender()
    assert _replied(outbox, ControlReply(1, b"\1")) is None
    outbox.add(operation(1))
    outbox.current()
    for reply in (ControlReply(0, b"\1"), ControlReply(2, b"\1"), ControlReply(1, b""), ControlReply(1, b"\1\1")):
        assert _replied(outbox, reply) is None
    assert _replied(outbox, ControlReply(1, b"\1")) is not None
    assert _replied(outbox, ControlReply(1, b"\1")) is None


def test_batch_size_is_limited() -> None:
    outbox = ReliableSender()
    for number in range(MAX_OPERATIONS + 1):
        outbox.add(operation(number))
    batch = outbox.current()
    assert batch is not None
    assert len(batch.operations) == MAX_OPERATIONS
    _replied(outbox, ControlReply(1, bytes(MAX_OPERATIONS)))
    assert outbox.current() == Batch(2, (operation(MAX_OPERATIONS),))


def test_repeated_batch_is_applied_once() -> None:
    inbox = ReliableReceiver()
    done: list[Operation] = []

    def do(wanted: Operation) -> bool:
        done.append(wanted)
        return wanted.rref.local_id == 1

    batch = Batch(1, (operation(1), operation(2)))
    assert inbox.take(batch, do) == ControlReply(1, b"\1\0")
    assert inbox.take(batch, do) == ControlReply(1, b"\1\0")
    assert done == [operation(1), operation(2)]
    assert inbox.take(Batch(2, (operation(3),)), do) == ControlReply(2, b"\0")
    assert inbox.take(batch, do) == ControlReply(1, b""), "an older one is not done, and what became of it is forgotten"
    assert inbox.take(Batch(4, (operation(4),)), do) == ControlReply(4, b""), "one before its turn is not done"
    assert done == [operation(1), operation(2), operation(3)]
