"""Aborts of backward passes on a network that loses messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from farprop.errors import ConnectionLostError, FarpropError, UsageError
from farprop.protocol.backward import Credit, CreditShare, PassId
from farprop.runtime.autograd.abort import PassAborter
from farprop.runtime.autograd.context_cleanup import ContextCleanup
from farprop.runtime.autograd.contexts import Context, ContextContainer
from farprop.runtime.autograd.driver import BackwardDriver, PassWaiter
from farprop.runtime.autograd.engine import LocalPass
from farprop.wire.dialect import PICKLES
from farprop.wire.fast_codec import encode_value
from farprop.wire.message import ANSWER, Message, Method

ME = 1


class Network:
    """Workers 0 to 4. ``broken`` says how many calls to a worker are lost."""

    label = "worker (rank 0)"
    rpc_timeout = 60.0
    dialect = PICKLES
    is_static = True

    def __init__(self) -> None:
        self.broken: dict[int, int] = {}
        self.knows: dict[int, list[int]] = {}
        self.calls: list[tuple[int, Method]] = []
        self.on_call: Callable[[], None] = lambda: None

    def name_of_rank(self, rank: int) -> str:
        return f"worker{rank}"

    def ranks(self) -> list[int]:
        return list(range(5))

    def _reach(self, rank: int, method: Method) -> None:
        self.calls.append((rank, method))
        self.on_call()
        if self.broken.get(rank, 0):
            self.broken[rank] -= 1
            raise ConnectionLostError("cut")

    def call_method(self, rank: int, method: Method, message: Message, timeout: float, system: bool) -> Message:
        self._reach(rank, method)
        answer = encode_value(self.knows.get(rank, []))
        answer.kind = ANSWER
        return answer

    def send_method(self, rank: int, method: Method, message: Message, call: Any, system: bool) -> None:
        self._reach(rank, method)

    def submit(self, function: Any, *args: Any) -> None:
        function(*args)

    def blocked(self) -> AbstractContextManager[None]:
        return nullcontext()


class Worker:
    def __init__(self, origin: int) -> None:
        self.network = Network()
        contexts = ContextContainer(ME)
        self.waiter = PassWaiter(1.0)
        self.aborter = PassAborter(  # type: ignore[arg-type]
            ME, self.network, contexts, lambda pass_id, error: self.waiter.fail(error)
        )
        self.cleanup = ContextCleanup(ME, self.network, contexts, self.aborter)  # type: ignore[arg-type]
        self.context: Context = contexts.new()
        self.leaf = torch.ones(2, requires_grad=True)
        self.context.gradients[self.leaf] = torch.full((2,), 5.0)
        self.id = PassId(origin, 1)
        self.local = self.run(self.id)

    def run(self, pass_id: PassId) -> LocalPass:
        """A pass that has changed a gradient on this worker."""
        self.context.attach(encode_value(None), 2, [self.leaf * 2])
        ((message_id, _),) = list(self.context.sends.items())[-1:]
        local = LocalPass(self.context, ME, pass_id, fast=False, keep_graph=True, anomaly=False)
        self.context.passes[pass_id] = local
        local.store(message_id, [torch.ones(2)])
        (run,) = local.machine.on_gradient(message_id, CreditShare(Credit(1, 1), {}))
        local.run(run)  # type: ignore[arg-type]
        local.machine.on_ran(run)  # type: ignore[arg-type]
        return local

    @property
    def gradient(self) -> list[float]:
        return self.context.gradients[self.leaf].tolist()


def test_failing_worker_undoes_its_gradients_only_when_the_origin_aborts() -> None:
    worker = Worker(origin=0)
    worker.aborter.fail(worker.local, ConnectionLostError("the partner is gone"))
    assert worker.gradient == [7.0, 7.0]
    assert worker.network.calls == [(0, Method.PASS_FAILED)]
    assert worker.aborter.on_abort(0, worker.context.id, *worker.id) == [2]
    assert worker.gradient == [5.0, 5.0]
    # A repeated abort, after a lost answer, gets the same answer.
    assert worker.aborter.on_abort(0, worker.context.id, *worker.id) == [2]
    assert worker.gradient == [5.0, 5.0]


def test_failure_report_is_retried_until_it_reaches_the_origin() -> None:
    worker = Worker(origin=0)
    worker.network.broken[0] = 2
    worker.aborter.fail(worker.local, ValueError("no"))
    assert worker.network.calls == [(0, Method.PASS_FAILED)] * 3
    worker.aborter.fail(worker.local, ValueError("no"))  # reported already
    assert len(worker.network.calls) == 3


def test_abort_follows_the_workers_that_each_worker_knows() -> None:
    worker = Worker(origin=ME)
    worker.network.knows = {2: [1, 3], 3: [2]}
    worker.network.broken[2] = 1
    worker.aborter.abort_everywhere(worker.local)
    assert worker.network.calls == [(2, Method.ABORT), (2, Method.ABORT), (3, Method.ABORT)]
    assert worker.gradient == [5.0, 5.0]


def test_abort_asks_every_worker_if_one_is_dead() -> None:
    worker = Worker(origin=ME)
    worker.network.broken[2] = 99
    worker.aborter.abort_everywhere(worker.local)
    assert {rank for rank, _ in worker.network.calls} == {0, 2, 3, 4}


@pytest.mark.parametrize("origin", [0, ME])
def test_loss_of_a_partner_is_reported_though_the_pass_has_stopped_here(origin: int) -> None:
    """Only the partner was told why it had stopped, in an answer, and died: ``backward`` waited until its timeout."""
    worker = Worker(origin)
    worker.local.partners.add(2)
    worker.aborter.stop(worker.local)
    worker.cleanup.on_connection_lost(2)
    if origin == ME:
        assert isinstance(worker.waiter.error, ConnectionLostError)
    else:
        assert worker.network.calls == [(origin, Method.PASS_FAILED)]


def test_loss_of_a_partner_is_not_the_reason_for_an_abort_that_is_under_way() -> None:
    worker = Worker(origin=ME)
    worker.network.on_call = lambda: worker.cleanup.on_connection_lost(2)
    worker.local.partners.add(2)
    worker.aborter.abort_everywhere(worker.local)
    assert worker.network.calls == [(2, Method.ABORT)]
    assert worker.waiter.error is None


def test_first_failure_at_the_origin_is_the_error_of_the_pass() -> None:
    worker = Worker(origin=ME)
    worker.aborter.fail(worker.local, FarpropError("first"))
    worker.aborter.fail(worker.local, FarpropError("second"))
    with pytest.raises(FarpropError, match="first"):
        worker.waiter.next(worker.network)  # type: ignore[arg-type]
    assert worker.network.calls == []


def test_closing_fails_passes_that_wait() -> None:
    """Another thread shut the worker down while one waited for credit: it went on waiting, until its timeout."""
    driver = BackwardDriver(ME, Network())
    waiter = driver._waiters[PassId(ME, 1)] = PassWaiter(None)
    assert driver.is_waiting
    driver.close()
    with pytest.raises(UsageError, match="shut down"):
        waiter.next(Network())
