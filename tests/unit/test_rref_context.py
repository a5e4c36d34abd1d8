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
from farprop.runtime.future_call import FutureCall
from farprop.runtime.references.owned_values import ValueSlot
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.references.user_references import RRefHandle
from farprop.runtime.timers import TimerHandle, TimerHeap
from farprop.wire.dialect import PICKLES
from farprop.wire.message import REFS, Message, pack_operations

ME, ANN, BOB = range(3)
ROUTE = object()
FOREVER = 1e18


class StubTransport:
    """Records batches and jobs. Each batch or job first raises one of ``failures``, while there are any."""

    label = "worker0 (rank 0)"
    dialect = PICKLES
    is_static = True

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.sent: list[tuple[int, Batch]] = []
        self.batch_failures: list[BaseException] = []
        self.job_failures: list[BaseException] = []
        self.suspected: list[int] = []
        self.timers = TimerHeap()
        self.lockfree_timers = 0
        self.on_connect: Callable[[], None] = lambda: None

    def name_of_rank(self, rank: int) -> str:
        return f"worker{rank}"

    def is_ready(self, rank: int) -> bool:
        return False

    def connect(self, rank: int, timeout: float) -> Any:
        self.on_connect()
        return rank

    def send_batch(self, connection: Any, batch: Batch, call: FutureCall) -> None:
        if self.batch_failures:
            raise self.batch_failures.pop(0)
        self.sent.append((connection, batch))

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

    def create(self, owner: int, register: bool = True) -> RRefHandle:
        """What ``remote()`` makes."""
        handle = self.context.users.prepare(owner, "here")
        if register:
            self.context.users.create(handle.record)
        return handle

    def operate(self, sender: int, number: int, *operations: Operation, instance: str = "a") -> bytes:
        return self.context.operate(sender, instance, number, pack_operations(operations))

    def run_all(self) -> None:
        """Run all jobs and timers, whether they are due or not."""
        self.transport.timers.run_due(FOREVER)
        self.transport.run_jobs()

    def answer_all(self) -> None:
        """Answer every batch once, including those that follow from an answer, as if no operation had an effect."""
        for rank, batch in self.transport.sent:  # grows while it is iterated
            self.context._sender.answered(rank, ControlReply(batch.number, bytes(len(batch.operations))))
            self.run_all()

    def assert_empty(self) -> None:
        assert not any(self.context.counts().values()), self.context.counts()
        assert self.context.settled
        self.context._machine.validate()


@pytest.fixture
def worker() -> Worker:
    return Worker()


def run_with_timeout(function: Callable[[], object]) -> list[Any]:
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


# Requests for a value that arrive before the call that makes it


@pytest.mark.parametrize("kind", [OperationKind.RECALL, OperationKind.FORGO])
def test_early_request_for_a_value_fails_when_its_call_is_given_up(worker: Worker, kind: OperationKind) -> None:
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


def test_request_for_a_value_of_a_recalled_call_fails_at_once(worker: Worker) -> None:
    rref = GlobalId(ANN, 0)
    worker.operate(ANN, 1, Operation(OperationKind.RECALL, rref, GlobalId(ANN, 1)))
    with pytest.raises(ReferenceLostError, match="lost"):
        worker.context.values.slot_of(rref, exists=False)


def test_request_for_a_value_of_a_dead_creator_fails_at_once(worker: Worker) -> None:
    early = worker.context.values.slot_of(GlobalId(ANN, 0), exists=False)
    worker.context.died(ANN)
    assert isinstance(early.error, ReferenceLostError)
    with pytest.raises(ReferenceLostError):
        worker.context.values.slot_of(GlobalId(ANN, 0), exists=False)
    assert not worker.context.values.slot_of(GlobalId(BOB, 0), exists=False).done


def test_request_made_while_a_death_is_handled_fails_too(worker: Worker) -> None:
    """A callback that runs while the death is being handled asks for another value."""
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


# Messages from dead workers


def test_batch_of_a_dead_worker_is_refused(worker: Worker) -> None:
    value = worker.owned()
    fork = worker.pass_own(value, BOB)
    worker.operate(BOB, 1, Operation(OperationKind.ACCEPT, value.rref, fork.fork))
    worker.context.died(ANN)
    with pytest.raises(ConnectionLostError, match="dead"):
        worker.operate(ANN, 1, Operation(OperationKind.REGISTER, value.rref, GlobalId(ANN, 7), True))
    worker.operate(BOB, 2, Operation(OperationKind.DELETE, value.rref, fork.fork))
    worker.run_all()
    worker.assert_empty()


def test_batch_of_a_replaced_instance_is_refused(worker: Worker) -> None:
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


def test_instance_that_replaces_a_dead_one_is_not_dead(worker: Worker) -> None:
    worker.context.instances.meet(ANN, "old")
    worker.context.died(ANN)
    assert worker.context.instances.is_dead(ANN, "old")
    worker.context.instances.meet(ANN, "new")
    assert not worker.context.instances.is_dead(ANN, "new")
    assert worker.context.instances.get(ANN) == "new"


def test_replaced_instance_does_not_replace_its_successor(worker: Worker) -> None:
    """It was taken for dead, and comes back."""
    instances, told = worker.context.instances, list[tuple[int, str]]()
    worker.context.on_replaced = lambda *replaced: told.append(replaced)
    instances.meet(ANN, "old")
    instances.meet(ANN, "new")
    assert instances.is_dead(ANN, "old")
    with pytest.raises(ConnectionLostError, match="Another process has taken rank"):
        instances.meet(ANN, "old")
    assert (instances.get(ANN), told) == ("new", [(ANN, "new")])


def test_late_news_of_a_death_does_not_concern_the_successor(worker: Worker) -> None:
    """The failure detector dialled the old instance, and the new one was met meanwhile."""
    instances = worker.context.instances
    instances.meet(ANN, "old")
    instances.meet(ANN, "new")
    assert not worker.context.died(ANN, "old")
    assert not instances.is_dead(ANN, "new")
    # A worker that was never met is known by its entry. Another one may come.
    assert worker.context.died(BOB, "old")
    assert instances.is_dead(BOB, "old")
    assert not instances.is_dead(BOB, "new")


def test_operations_for_a_worker_do_not_reach_its_successor(worker: Worker) -> None:
    """The successor is found when the worker is dialled. It would list a reference that is void here, for ever."""
    instances, transport = worker.context.instances, worker.transport
    instances.meet(ANN, "old")
    fork = Fork(ANN, GlobalId(BOB, 0), GlobalId(BOB, 1), exists=False)
    message = Message(b"", [])
    message.refs, message.flags = [fork], REFS
    worker.context.take_refs(BOB, message)
    transport.on_connect = lambda: instances.meet(ANN, "new")
    worker.run_all()
    worker.run_all()  # what follows from that
    assert (ANN, OperationKind.REGISTER) not in transport.sent_kinds()
    assert (BOB, OperationKind.ACCEPT) in transport.sent_kinds()


def test_successor_is_told_not_to_wait_for_a_call_to_the_one_before(worker: Worker) -> None:
    worker.context.instances.meet(ANN, "old")
    handle = worker.create(ANN)
    worker.context._do(worker.context._machine.fork, handle.record, BOB, ROUTE)
    worker.context.instances.meet(ANN, "new")
    worker.run_all()
    assert (ANN, OperationKind.RECALL) in worker.transport.sent_kinds()


# Messages that were not sent, or may have been


def test_lost_call_to_the_same_worker_leaves_nothing(worker: Worker) -> None:
    worker.pass_own(worker.owned(), ME)
    assert not worker.context.settled
    worker.context.route_lost(ROUTE, ME)
    worker.run_all()
    worker.assert_empty()


def test_fork_in_doubt_is_revoked(worker: Worker) -> None:
    fork = worker.pass_own(worker.owned(), ANN)
    worker.context.doubted([fork])
    worker.run_all()
    assert worker.transport.sent_kinds() == [(ANN, OperationKind.REVOKE)]
    worker.context._sender.answered(ANN, ControlReply(worker.transport.sent[0][1].number, b"\0"))
    worker.run_all()
    worker.assert_empty()


@pytest.mark.parametrize("sent", [True, False])
def test_abandoned_creation_leaves_no_reference(worker: Worker, sent: bool) -> None:
    record = worker.create(ANN).record
    worker.context.abandon(record, sent)
    worker.run_all()
    assert worker.transport.sent_kinds() == ([(ANN, OperationKind.RECALL), (ANN, OperationKind.FORGO)] if sent else [])
    for rank, batch in worker.transport.sent:
        worker.context._sender.answered(rank, ControlReply(batch.number, bytes(len(batch.operations))))
    worker.run_all()
    worker.assert_empty()


@pytest.mark.parametrize("error", [RuntimeError("the store is gone"), OSError("no descriptors"), KeyError(1)])
def test_batch_is_sent_again_after_any_error(worker: Worker, error: Exception) -> None:
    worker.transport.batch_failures.append(error)
    held = worker.create(ANN)
    worker.context.users.created(held.record)
    del held
    worker.run_all()
    worker.run_all()
    assert worker.transport.suspected == [ANN]
    worker.run_all()
    assert worker.transport.sent_kinds() == [(ANN, OperationKind.DELETE)]
    worker.context._sender.answered(ANN, ControlReply(worker.transport.sent[0][1].number, b"\1"))
    worker.assert_empty()


def test_operation_added_while_a_reply_is_processed_is_sent(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
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
    worker.run_all()
    monkeypatch.setattr(batches, "_replied", another_is_faster)
    worker.answer_all()
    worker.assert_empty()
    assert [batch.number for _, batch in worker.transport.sent] == [1, 2]  # none was sent twice


# Interrupts


def test_interrupt_before_a_batch_is_submitted_does_not_lose_it(worker: Worker) -> None:
    fork = worker.pass_own(worker.owned(), ANN)
    worker.transport.job_failures.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        worker.context.doubted([fork])
    assert worker.transport.lockfree_timers == 1
    assert not worker.context.settled
    worker.run_all()
    assert worker.transport.sent_kinds() == [(ANN, OperationKind.REVOKE)]


def test_interrupt_while_a_value_is_freed_does_not_leak_it(worker: Worker) -> None:
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
    worker.run_all()
    assert freed == [1]
    worker.assert_empty()


# Finalisers that make calls


def test_finaliser_that_re_enters_the_context_raises(worker: Worker) -> None:
    """It would deadlock: the lock is held by its own thread."""
    context = worker.context

    (outcome,) = run_with_timeout(lambda: context._do(context.counts))
    assert isinstance(outcome, UsageError)
    assert "__del__" in str(outcome)
    # The context is usable again.
    assert run_with_timeout(lambda: context.settled) == [True]


def test_finaliser_inside_the_context_may_make_and_drop_references(worker: Worker) -> None:
    context = worker.context

    def finaliser() -> str:
        worker.create(ANN, register=False)  # and drops it
        return context.values.own(ValueSlot()).state.name

    assert run_with_timeout(lambda: context._do(finaliser)) == ["FREED"]
    worker.run_all()
    worker.assert_empty()


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
def test_every_use_by_a_finaliser_inside_the_context_raises(worker: Worker, use: str) -> None:
    (outcome,) = run_with_timeout(lambda: worker.context._do(_USES[use], worker.context))
    assert isinstance(outcome, UsageError)


@pytest.mark.parametrize(
    ("use", "step"),
    [("counts", "counts"), ("concerned_with", "concerns"), ("slot_of", "find"), ("route_lost", "concerns")],
)
def test_finaliser_raises_whatever_its_thread_does_inside_the_context(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, use: str, step: str
) -> None:
    def collect_garbage(*args: object) -> None:
        worker.create(ANN)

    monkeypatch.setattr(worker.context._machine, step, collect_garbage)
    (outcome,) = run_with_timeout(lambda: _USES[use](worker.context))
    assert isinstance(outcome, UsageError)


def test_break_off_drops_the_value_outside_the_lock() -> None:
    slot = ValueSlot()
    seen: list[Any] = []

    class Value:
        def __del__(self) -> None:
            slot.when_done(lambda: seen.append(type(slot.error)))

    slot.fill(Value())
    run_with_timeout(lambda: slot.break_off(TimeoutError()))
    assert seen == [TimeoutError]
    with pytest.raises(TimeoutError):
        slot.get()
