"""A worker's references with nobody at the other end: races, interrupts and deaths, one step at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError
from farprop.ids import GlobalId
from farprop.protocol.references.messages import Fork, Kind, Operation, Reply, pack_operations, unpack_operations
from farprop.protocol.references.records import OwnedValue
from farprop.runtime.cells import Cell
from farprop.runtime.links import FutureCall
from farprop.runtime.references import ReferenceSpace
from farprop.wire.codec import Encoded
from farprop.wire.dialect import PICKLES

ME, ANN, BOB = range(3)
ROUTE = object()
FOREVER = 1e18


class StubCourier:
    """Notes what it is asked to do. ``failures`` are raised first, one at each batch or job."""

    dialect = PICKLES

    def __init__(self) -> None:
        self.jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.sent: list[tuple[int, int, bytes]] = []
        self.batch_failures: list[BaseException] = []
        self.job_failures: list[BaseException] = []
        self.looked_after: list[int] = []
        self.nudges = 0

    def name_of_rank(self, rank: int) -> str:
        return f"worker{rank}"

    def is_ready(self, rank: int) -> bool:
        return False

    def send_batch(self, rank: int, number: int, operations: bytes, call: FutureCall) -> None:
        if self.batch_failures:
            raise self.batch_failures.pop(0)
        self.sent.append((rank, number, operations))

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        if self.job_failures:
            raise self.job_failures.pop(0)
        self.jobs.append((function, args))

    def run_jobs(self) -> None:
        """What a pool does: what a job raises ends that job only."""
        while self.jobs:
            function, args = self.jobs.popleft()
            try:
                function(*args)
            except Exception:
                pass

    def set_alarm(self, when: float) -> None: ...

    def nudge(self, when: float) -> None:
        self.nudges += 1

    def look_after(self, rank: int) -> None:
        self.looked_after.append(rank)

    def sent_kinds(self) -> list[tuple[int, Kind]]:
        return [(rank, operation.kind) for rank, _, data in self.sent for operation in unpack_operations(data)]


class Traveller:
    def __init__(self, value: OwnedValue) -> None:
        self._value = value

    def _source(self, use: str) -> OwnedValue:
        return self._value


class Worker:
    """A reference space and its courier."""

    def __init__(self) -> None:
        self.courier = StubCourier()
        self.space = ReferenceSpace(ME, "worker0", self.courier, lambda context: None)

    def pass_own(self, value: OwnedValue, to: int) -> Fork:
        _, (fork,) = self.space.depart(Encoded(b"", [], None, 0, [Traveller(value)]), to, ROUTE)
        return fork

    def owned(self, value: Any = 1) -> OwnedValue:
        cell = Cell()
        cell.fill(value)
        return self.space.own(cell)

    def operate(self, sender: int, number: int, *operations: Operation, instance: str = "a") -> bytes:
        return self.space.operate(sender, instance, number, pack_operations(operations))

    def turn(self) -> None:
        """Whatever is due, now or later."""
        self.space.expire(FOREVER)
        self.courier.run_jobs()

    def answer_all(self) -> None:
        """Answer every batch once, those that follow from an answer too: there was nothing to do it on."""
        for rank, number, data in self.courier.sent:  # which grows meanwhile
            self.space._batches.answered(rank, Reply(number, bytes(len(unpack_operations(data)))))
            self.turn()

    def assert_empty(self) -> None:
        assert not any(self.space.counts().values()), self.space.counts()
        assert self.space.settled
        self.space._machine.validate()


@pytest.fixture
def worker() -> Worker:
    return Worker()


def ends(function: Callable[[], object]) -> list[Any]:
    """What it returns or raises, from a thread that may get stuck."""
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


@pytest.mark.parametrize("kind", [Kind.RECALL, Kind.FORGO])
def test_who_asks_too_early_is_told_when_the_call_is_given_up(worker: Worker, kind: Kind) -> None:
    rref, fork = GlobalId(ANN, 0), GlobalId(ANN, 1)
    cell = worker.space.cell_of(rref, exists=False)
    other = worker.space.cell_of(GlobalId(ANN, 7), exists=False)
    told: list[bool] = []
    cell.when_done(lambda: told.append(True))
    worker.operate(ANN, 1, Operation(kind, rref, fork))
    assert told == [True]
    with pytest.raises(ReferenceLostError, match="worker1"):
        cell.get()
    assert not other.done


def test_who_asks_after_the_call_was_recalled_is_told_at_once(worker: Worker) -> None:
    rref = GlobalId(ANN, 0)
    worker.operate(ANN, 1, Operation(Kind.RECALL, rref, GlobalId(ANN, 1)))
    with pytest.raises(ReferenceLostError, match="lost"):
        worker.space.cell_of(rref, exists=False)


def test_who_asks_for_a_value_of_a_dead_creator_is_told_at_once(worker: Worker) -> None:
    early = worker.space.cell_of(GlobalId(ANN, 0), exists=False)
    worker.space.died(ANN)
    assert isinstance(early.error, ReferenceLostError)
    with pytest.raises(ReferenceLostError):
        worker.space.cell_of(GlobalId(ANN, 0), exists=False)
    assert not worker.space.cell_of(GlobalId(BOB, 0), exists=False).done


def test_who_asks_while_a_death_is_dealt_with_is_told_as_well(worker: Worker) -> None:
    """Whoever waited is called while it is not over yet, and asks for the next one."""
    late: list[Any] = []

    def ask() -> None:
        try:
            late.append(worker.space.cell_of(GlobalId(ANN, 5), exists=False))
        except ReferenceLostError as error:
            late.append(error)

    worker.space.cell_of(GlobalId(ANN, 0), exists=False).when_done(ask)
    worker.space.died(ANN)
    assert len(late) == 1
    assert isinstance(late[0], ReferenceLostError)
    assert not worker.space._early


# Messages of the dead


def test_a_batch_of_a_dead_worker_is_refused(worker: Worker) -> None:
    value = worker.owned()
    fork = worker.pass_own(value, BOB)
    worker.operate(BOB, 1, Operation(Kind.ACCEPT, value.rref, fork.fork))
    worker.space.died(ANN)
    with pytest.raises(ConnectionLostError, match="dead"):
        worker.operate(ANN, 1, Operation(Kind.REGISTER, value.rref, GlobalId(ANN, 7), True))
    worker.operate(BOB, 2, Operation(Kind.DELETE, value.rref, fork.fork))
    worker.turn()
    worker.assert_empty()


def test_a_batch_of_an_instance_whose_place_is_taken_is_refused(worker: Worker) -> None:
    value = worker.owned()
    fork = worker.pass_own(value, BOB)
    worker.space.meet(ANN, "old")
    worker.space.meet(ANN, "new")
    register = Operation(Kind.REGISTER, value.rref, GlobalId(ANN, 7), True)
    with pytest.raises(ConnectionLostError, match="dead"):
        worker.operate(ANN, 1, register, instance="old")
    assert value.forks == {fork.fork: BOB}
    assert worker.operate(ANN, 1, register, instance="new") == b"\1"
    assert value.forks == {fork.fork: BOB, GlobalId(ANN, 7): ANN}


def test_an_instance_that_takes_a_place_is_not_dead(worker: Worker) -> None:
    worker.space.meet(ANN, "old")
    worker.space.died(ANN)
    assert worker.space.is_dead(ANN, "old")
    worker.space.meet(ANN, "new")
    assert not worker.space.is_dead(ANN, "new")
    assert worker.space.instance_of(ANN) == "new"


# Messages that were not sent, or may have been


def test_a_call_to_ourselves_that_is_lost_leaves_nothing(worker: Worker) -> None:
    worker.pass_own(worker.owned(), ME)
    assert not worker.space.settled
    worker.space.route_lost(ROUTE, ME)
    worker.turn()
    worker.assert_empty()


def test_a_fork_in_doubt_is_asked_for(worker: Worker) -> None:
    fork = worker.pass_own(worker.owned(), ANN)
    worker.space.doubted([fork])
    worker.turn()
    assert worker.courier.sent_kinds() == [(ANN, Kind.REVOKE)]
    worker.space._batches.answered(ANN, Reply(worker.courier.sent[0][1], b"\0"))
    worker.turn()
    worker.assert_empty()


@pytest.mark.parametrize("sent", [True, False])
def test_a_creation_that_is_abandoned_is_no_reference_any_more(worker: Worker, sent: bool) -> None:
    record = worker.space.create(ANN, "here")
    worker.space.abandon(record, sent)
    worker.turn()
    assert worker.courier.sent_kinds() == ([(ANN, Kind.RECALL), (ANN, Kind.FORGO)] if sent else [])
    for rank, number, data in worker.courier.sent:
        worker.space._batches.answered(rank, Reply(number, b"\0" * len(unpack_operations(data))))
    worker.turn()
    worker.assert_empty()


@pytest.mark.parametrize("error", [RuntimeError("the store is gone"), OSError("no descriptors"), KeyError(1)])
def test_a_batch_that_can_not_be_sent_is_sent_again_whatever_the_reason(worker: Worker, error: Exception) -> None:
    worker.courier.batch_failures.append(error)
    record = worker.space.create(ANN, "here")
    worker.space.created(record)
    held = worker.space.hold(record)
    del held
    worker.turn()
    worker.turn()
    assert worker.courier.looked_after == [ANN]
    worker.turn()
    assert worker.courier.sent_kinds() == [(ANN, Kind.DELETE)]
    worker.space._batches.answered(ANN, Reply(worker.courier.sent[0][1], b"\1"))
    worker.assert_empty()


def test_what_is_to_be_sent_while_an_answer_is_taken_in_is_not_forgotten(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread wants to send when the answer is there and the machine has not heard of it yet."""
    first, second = (worker.pass_own(worker.owned(), ANN) for _ in range(2))
    batches = worker.space._batches
    take_in = batches._replied

    def another_is_faster(peer: int, reply: Reply) -> None:
        monkeypatch.setattr(batches, "_replied", take_in)
        worker.space.doubted([second])
        worker.courier.run_jobs()
        take_in(peer, reply)

    worker.space.doubted([first])
    worker.turn()
    monkeypatch.setattr(batches, "_replied", another_is_faster)
    worker.answer_all()
    worker.assert_empty()
    assert [number for _, number, _ in worker.courier.sent] == [1, 2]  # and none was sent twice


# Interrupts


def test_an_interrupt_between_a_step_and_what_follows_loses_no_batch(worker: Worker) -> None:
    fork = worker.pass_own(worker.owned(), ANN)
    worker.courier.job_failures.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        worker.space.doubted([fork])
    assert worker.courier.nudges == 1
    assert not worker.space.settled
    worker.turn()
    assert worker.courier.sent_kinds() == [(ANN, Kind.REVOKE)]


def test_an_interrupt_while_a_value_is_freed_does_not_keep_it(worker: Worker) -> None:
    freed: list[int] = []

    class Value:
        def __del__(self) -> None:
            freed.append(1)

    value = worker.owned(Value())
    fork = worker.pass_own(value, ANN)
    del value
    worker.courier.job_failures.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        worker.space.not_sent([fork])
    worker.turn()
    assert freed == [1]
    worker.assert_empty()


# Finalisers that make calls


def test_a_finaliser_that_calls_while_its_thread_is_inside_is_told(worker: Worker) -> None:
    """It would wait for its own thread."""
    space = worker.space

    def finaliser() -> None:
        space.own(Cell())

    (outcome,) = ends(lambda: space._do(finaliser))
    assert isinstance(outcome, UsageError)
    assert "__del__" in str(outcome)
    assert ends(lambda: space.own(Cell()).state.name) == ["FREED"]  # nobody is left inside


def test_breaking_off_lets_go_of_the_value_outside_of_the_lock() -> None:
    cell = Cell()
    seen: list[Any] = []

    class Value:
        def __del__(self) -> None:
            cell.when_done(lambda: seen.append(type(cell.error)))

    cell.fill(Value())
    ends(lambda: cell.break_off(TimeoutError()))
    assert seen == [TimeoutError]
    with pytest.raises(TimeoutError):
        cell.get()
