"""The references of one worker with a fake transport: races, interrupts and deaths, one step at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError
from farprop.ids import GlobalId
from farprop.protocol.references.control_plane import Batch, ControlReply, Operation, OperationKind
from farprop.protocol.references.records import Fork, OwnedValue
from farprop.runtime.client_connection import FutureCall
from farprop.runtime.references.owned_values import ValueSlot
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.timers import TimerHandle, TimerHeap
from farprop.wire.dialect import PICKLES
from farprop.wire.message import Message, pack_operations

ME, ANN, BOB = range(3)
ROUTE = object()
FOREVER = 1e18


class StubTransport:
    """Records batches and jobs. Each batch or job first raises one of ``failures``, while there are any."""

    label = "worker0 (rank 0)"
    dialect = PICKLES

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.sent: list[tuple[int, Batch]] = []
        self.batch_failures: list[BaseException] = []
        self.job_failures: list[BaseException] = []
        self.suspected: list[int] = []
        self.timers = TimerHeap()
        self.lockfree_timers = 0

    def name_of_rank(self, rank: int) -> str:
        return f"worker{rank}"

    def is_ready(self, rank: int) -> bool:
        return False

    def send_batch(self, rank: int, batch: Batch, call: FutureCall) -> None:
        if self.batch_failures:
            raise self.batch_failures.pop(0)
        self.sent.append((rank, batch))

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        if self.job_failures:
            raise self.job_failures.pop(0)
        self.jobs.append((function, args))

    def run_jobs(self) -> None:
        """Run the jobs like a pool: an exception ends only its own job."""
        while self.jobs:
            function, args = self.jobs.popleft()
            try:
                function(*args)
            except Exception:
                pass

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        return self.timers.call_at(when, callback)

    def call_at_lockfree(self, when: float, callback: Callable[[], None]) -> None:
        self.lockfree_timers += 1
        self.timers.call_at_lockfree(when, callback)

    def suspect(self, rank: int) -> None:
        self.suspected.append(rank)

    def sent_kinds(self) -> list[tuple[int, OperationKind]]:
        return [(rank, operation.kind) for rank, batch in self.sent for operation in batch.operations]


class OutOfBand:
    def __init__(self, value: OwnedValue) -> None:
        self._value = value

    def _source(self, use: str) -> OwnedValue:
        return self._value


class Worker:
    """A context and its transport."""

    def __init__(self) -> None:
        self.transport = StubTransport()
        self.context = RRefContext(ME, "worker0", self.transport, lambda context_id: None)

    def pass_own(self, value: OwnedValue, to: int) -> Fork:
        message = Message(b"", [], out_of_band=[OutOfBand(value)])
        self.context.attach_refs(message, to, ROUTE)
        (fork,) = message.refs
        return fork

    def owned(self, value: Any = 1) -> OwnedValue:
        slot = ValueSlot()
        slot.fill(value)
        return self.context.values.own(slot)

    def operate(self, sender: int, number: int, *operations: Operation, instance: str = "a") -> bytes:
        return self.context.operate(sender, instance, number, pack_operations(operations))

    def turn(self) -> None:
        """Run all jobs and timers, whether they are due or not."""
        self.transport.timers.run_due(FOREVER)
        self.transport.run_jobs()

    def answer_all(self) -> None:
        """Answer every batch once, including those that follow from an answer, as if no operation had an effect."""
        for rank, batch in self.transport.sent:  # which grows meanwhile
            self.context._sender.answered(rank, ControlReply(batch.number, bytes(len(batch.operations))))
            self.turn()

    def assert_empty(self) -> None:
        assert not any(self.context.counts().values()), self.context.counts()
        assert self.context.settled
        self.context._machine.validate()


@pytest.fixture
def worker() -> Worker:
    return Worker()


def ends(function: Callable[[], object]) -> list[Any]:
    """The result or exception of a function, run on a thread of its own because it may block forever."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert results, "it is stuck"
    return results


# A value that is asked for before the call that makes it has come


@pytest.mark.parametrize("kind", [OperationKind.RECALL, OperationKind.FORGO])
def test_who_asks_too_early_is_told_when_the_call_is_given_up(worker: Worker, kind: OperationKind) -> None:
    rref, fork = GlobalId(ANN, 0), GlobalId(ANN, 1)
    slot = worker.context.values.slot_of(rref, exists=False)
    other = worker.context.values.slot_of(GlobalId(ANN, 7), exists=False)
    told: list[bool] = []
    slot.when_done(lambda: told.append(True))
    worker.operate(ANN, 1, Operation(kind, rref, fork))
    assert told == [True]
    with pytest.raises(ReferenceLostError, match="worker1"):
        slot.get()
    assert not other.done


def test_who_asks_after_the_call_was_recalled_is_told_at_once(worker: Worker) -> None:
    rref = GlobalId(ANN, 0)
    worker.operate(ANN, 1, Operation(OperationKind.RECALL, rref, GlobalId(ANN, 1)))
    with pytest.raises(ReferenceLostError, match="lost"):
        worker.context.values.slot_of(rref, exists=False)


def test_who_asks_for_a_value_of_a_dead_creator_is_told_at_once(worker: Worker) -> None:
    early = worker.context.values.slot_of(GlobalId(ANN, 0), exists=False)
    worker.context.died(ANN)
    assert isinstance(early.error, ReferenceLostError)
    with pytest.raises(ReferenceLostError):
        worker.context.values.slot_of(GlobalId(ANN, 0), exists=False)
    assert not worker.context.values.slot_of(GlobalId(BOB, 0), exists=False).done


def test_who_asks_while_a_death_is_dealt_with_is_told_as_well(worker: Worker) -> None:
    """Whoever waited is called while it is not over yet, and asks for the next one."""
    late: list[Any] = []

    def ask() -> None:
        try:
            late.append(worker.context.values.slot_of(GlobalId(ANN, 5), exists=False))
        except ReferenceLostError as error:
            late.append(error)

    worker.context.values.slot_of(GlobalId(ANN, 0), exists=False).when_done(ask)
    worker.context.died(ANN)
    assert len(late) == 1
    assert isinstance(late[0], ReferenceLostError)
    assert not worker.context.values.early_slots


# Messages of the dead


def test_a_batch_of_a_dead_worker_is_refused(worker: Worker) -> None:
    value = worker.owned()
    fork = worker.pass_own(value, BOB)
    worker.operate(BOB, 1, Operation(OperationKind.ACCEPT, value.rref, fork.fork))
    worker.context.died(ANN)
    with pytest.raises(ConnectionLostError, match="dead"):
        worker.operate(ANN, 1, Operation(OperationKind.REGISTER, value.rref, GlobalId(ANN, 7), True))
    worker.operate(BOB, 2, Operation(OperationKind.DELETE, value.rref, fork.fork))
    worker.turn()
    worker.assert_empty()


def test_a_batch_of_an_instance_whose_place_is_taken_is_refused(worker: Worker) -> None:
    value = worker.owned()
    fork = worker.pass_own(value, BOB)
    worker.context.instances.meet(ANN, "old")
    worker.context.instances.meet(ANN, "new")
    register = Operation(OperationKind.REGISTER, value.rref, GlobalId(ANN, 7), True)
    with pytest.raises(ConnectionLostError, match="dead"):
        worker.operate(ANN, 1, register, instance="old")
    assert value.forks == {fork.fork: BOB}
    assert worker.operate(ANN, 1, register, instance="new") == b"\1"
    assert value.forks == {fork.fork: BOB, GlobalId(ANN, 7): ANN}


def test_an_instance_that_takes_a_place_is_not_dead(worker: Worker) -> None:
    worker.context.instances.meet(ANN, "old")
    worker.context.died(ANN)
    assert worker.context.instances.is_dead(ANN, "old")
    worker.context.instances.meet(ANN, "new")
    assert not worker.context.instances.is_dead(ANN, "new")
    assert worker.context.instances.get(ANN) == "new"


# Messages that were not sent, or may have been


def test_a_call_to_ourselves_that_is_lost_leaves_nothing(worker: Worker) -> None:
    worker.pass_own(worker.owned(), ME)
    assert not worker.context.settled
    worker.context.route_lost(ROUTE, ME)
    worker.turn()
    worker.assert_empty()


def test_a_fork_in_doubt_is_asked_for(worker: Worker) -> None:
    fork = worker.pass_own(worker.owned(), ANN)
    worker.context.doubted([fork])
    worker.turn()
    assert worker.transport.sent_kinds() == [(ANN, OperationKind.REVOKE)]
    worker.context._sender.answered(ANN, ControlReply(worker.transport.sent[0][1].number, b"\0"))
    worker.turn()
    worker.assert_empty()


@pytest.mark.parametrize("sent", [True, False])
def test_a_creation_that_is_abandoned_is_no_reference_any_more(worker: Worker, sent: bool) -> None:
    record = worker.context.users.create(ANN, "here")
    worker.context.abandon(record, sent)
    worker.turn()
    assert worker.transport.sent_kinds() == ([(ANN, OperationKind.RECALL), (ANN, OperationKind.FORGO)] if sent else [])
    for rank, batch in worker.transport.sent:
        worker.context._sender.answered(rank, ControlReply(batch.number, bytes(len(batch.operations))))
    worker.turn()
    worker.assert_empty()


@pytest.mark.parametrize("error", [RuntimeError("the store is gone"), OSError("no descriptors"), KeyError(1)])
def test_a_batch_that_can_not_be_sent_is_sent_again_whatever_the_reason(worker: Worker, error: Exception) -> None:
    worker.transport.batch_failures.append(error)
    record = worker.context.users.create(ANN, "here")
    worker.context.users.created(record)
    held = worker.context.users.hold(record)
    del held
    worker.turn()
    worker.turn()
    assert worker.transport.suspected == [ANN]
    worker.turn()
    assert worker.transport.sent_kinds() == [(ANN, OperationKind.DELETE)]
    worker.context._sender.answered(ANN, ControlReply(worker.transport.sent[0][1].number, b"\1"))
    worker.assert_empty()


def test_what_is_to_be_sent_while_an_answer_is_taken_in_is_not_forgotten(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread sends when the answer has arrived but the state machine has not processed it yet."""
    first, second = (worker.pass_own(worker.owned(), ANN) for _ in range(2))
    batches = worker.context._sender
    take_in = batches._replied

    def another_is_faster(peer: int, reply: ControlReply) -> None:
        monkeypatch.setattr(batches, "_replied", take_in)
        worker.context.doubted([second])
        worker.transport.run_jobs()
        take_in(peer, reply)

    worker.context.doubted([first])
    worker.turn()
    monkeypatch.setattr(batches, "_replied", another_is_faster)
    worker.answer_all()
    worker.assert_empty()
    assert [batch.number for _, batch in worker.transport.sent] == [1, 2]  # and none was sent twice


# Interrupts


def test_an_interrupt_between_a_step_and_what_follows_loses_no_batch(worker: Worker) -> None:
    fork = worker.pass_own(worker.owned(), ANN)
    worker.transport.job_failures.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        worker.context.doubted([fork])
    assert worker.transport.lockfree_timers == 1
    assert not worker.context.settled
    worker.turn()
    assert worker.transport.sent_kinds() == [(ANN, OperationKind.REVOKE)]


def test_an_interrupt_while_a_value_is_freed_does_not_keep_it(worker: Worker) -> None:
    freed: list[int] = []

    class Value:
        def __del__(self) -> None:
            freed.append(1)

    value = worker.owned(Value())
    fork = worker.pass_own(value, ANN)
    del value
    worker.transport.job_failures.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        worker.context.not_sent([fork])
    worker.turn()
    assert freed == [1]
    worker.assert_empty()


# Finalisers that make calls


def test_a_finaliser_that_calls_while_its_thread_is_inside_is_told(worker: Worker) -> None:
    """It would wait for its own thread."""
    context = worker.context

    def finaliser() -> None:
        context.values.own(ValueSlot())

    (outcome,) = ends(lambda: context._do(finaliser))
    assert isinstance(outcome, UsageError)
    assert "__del__" in str(outcome)
    assert ends(lambda: context.values.own(ValueSlot()).state.name) == ["FREED"]  # nobody is left inside


_USES: dict[str, Callable[[RRefContext], object]] = {
    "counts": lambda context: context.counts(),
    "settled": lambda context: context.settled,
    "snapshot": lambda context: context.snapshot(),
    "concerned_with": lambda context: context.concerned_with(ANN),
    "slot_of": lambda context: context.values.slot_of(GlobalId(ANN, 0), exists=False),
    "meet": lambda context: context.instances.meet(ANN, "a"),
    "route_lost": lambda context: context.route_lost(ROUTE, ANN),
}


@pytest.mark.parametrize("use", _USES)
def test_whatever_a_finaliser_does_while_its_thread_is_inside_it_is_told(worker: Worker, use: str) -> None:
    (outcome,) = ends(lambda: worker.context._do(_USES[use], worker.context))
    assert isinstance(outcome, UsageError)


@pytest.mark.parametrize(
    ("use", "step"),
    [("counts", "counts"), ("concerned_with", "concerns"), ("slot_of", "find"), ("route_lost", "concerns")],
)
def test_whatever_its_thread_does_inside_a_finaliser_is_told(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, use: str, step: str
) -> None:
    def collect_garbage(*args: object) -> None:
        worker.context.values.own(ValueSlot())

    monkeypatch.setattr(worker.context._machine, step, collect_garbage)
    (outcome,) = ends(lambda: _USES[use](worker.context))
    assert isinstance(outcome, UsageError)


def test_breaking_off_lets_go_of_the_value_outside_of_the_lock() -> None:
    slot = ValueSlot()
    seen: list[Any] = []

    class Value:
        def __del__(self) -> None:
            slot.when_done(lambda: seen.append(type(slot.error)))

    slot.fill(Value())
    ends(lambda: slot.break_off(TimeoutError()))
    assert seen == [TimeoutError]
    with pytest.raises(TimeoutError):
        slot.get()
