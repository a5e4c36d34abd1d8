"""Retries of calls, and what errors say about whether a call may have run."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import (
    ConnectionLostError,
    FarpropError,
    InjectedFaultError,
    OverloadedError,
    RpcTimeoutError,
    UsageError,
    not_run,
)
from farprop.runtime import admission
from farprop.testing import faults
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.support.workers import cluster

_CALLS = ["PYTHON_CALL"]


@rpc.idempotent
def _note_again(word: str) -> str:
    f.ran.append(word)
    return word


def _note(word: str) -> str:
    f.ran.append(word)
    return word


def _call(is_async: bool, func: Any, word: str, **options: Any) -> Any:
    if is_async:
        return rpc.rpc_async("worker1", func, args=(word,), **options).wait()
    return rpc.rpc_sync("worker1", func, args=(word,), **options)


def _unsent(is_async: bool) -> None:
    with faults.inject() as plan:
        plan.fail_at("worker1", 1)
        with pytest.raises(InjectedFaultError) as raised:
            _call(is_async, _note, "never")
        assert not raised.value.may_have_run
    with faults.inject() as plan:
        plan.fail_at("worker1", 1)
        plan.fail_at("worker1", 2)
        assert _call(is_async, _note, "third time", retry=rpc.Retry(3, 0.01)) == "third time"
        assert plan.counts == {"fail PYTHON_CALL": 2}
    with faults.inject() as plan:
        plan.fail(types=_CALLS)
        with pytest.raises(InjectedFaultError) as raised:
            _call(is_async, _note, "never", retry=rpc.Retry(3, 0.01))
        assert plan.counts == {"fail PYTHON_CALL": 3}
        assert "The call was tried 3 times." in raised.value.__notes__


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_was_not_sent_is_tried_again(is_async: bool) -> None:
    with cluster(2) as job:
        job.run(0, _unsent, is_async)
        assert job.run(1, f.noted) == ["third time"]


def _cut(is_async: bool) -> None:
    for func, runs in ((_note, False), (_note_again, True)):
        with faults.inject() as plan:
            plan.cut_at("worker1", 1)
            if runs:
                assert _call(is_async, func, "again", retry=rpc.Retry(2, 0.01)) == "again"
            else:
                with pytest.raises(ConnectionLostError) as raised:
                    _call(is_async, func, "never", retry=rpc.Retry(2, 0.01))
                assert raised.value.may_have_run


@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_may_have_run_is_tried_again_only_if_it_is_idempotent(is_async: bool) -> None:
    with cluster(2) as job:
        job.run(0, _cut, is_async)
        assert job.run(1, f.noted) == ["again"]


def _all_attempts_have_one_timeout() -> float:
    began = time.monotonic()
    with faults.inject() as plan:
        plan.fail(types=_CALLS)
        with pytest.raises(InjectedFaultError):
            rpc.rpc_sync("worker1", _note, args=("never",), timeout=0.5, retry=rpc.Retry(10_000, 0.01))
    with faults.inject() as plan:
        plan.lose(types=_CALLS)
        with pytest.raises(RpcTimeoutError) as raised:
            rpc.rpc_sync("worker1", _note_again, args=("never",), timeout=0.5, retry=rpc.Retry(10_000, 0.01))
        assert raised.value.may_have_run
        assert plan.counts == {"lose PYTHON_CALL": 1}
    return time.monotonic() - began


def test_all_attempts_together_have_the_timeout_of_the_call() -> None:
    with cluster(2) as job:
        assert job.run(0, _all_attempts_have_one_timeout) < 10  # 10,000 attempts would take days
        assert job.run(1, f.noted) == []


def _error_of(func: Any, *args: Any, **options: Any) -> tuple[str, bool]:
    try:
        rpc.rpc_sync("worker1", func, args=args, **options)
    except FarpropError as error:
        return type(error).__name__, error.may_have_run
    raise AssertionError("it should have failed")


def test_errors_of_a_worker_that_dies() -> None:
    with cluster(2) as job:
        pending = job.start(0, _error_of, f.wait_for_gate_and_note, "gate")
        wait_until(lambda: job.run(1, _requests_run))
        job.kill(1)
        assert pending.result() == (ConnectionLostError.__name__, True)
        assert job.run(0, _error_of, f.noop) == (ConnectionLostError.__name__, False)
        assert job.run(0, _error_of, f.noop, retry=rpc.Retry(3, 0.01)) == (ConnectionLostError.__name__, False)
        assert job.run(0, _error_of_future) == (ConnectionLostError.__name__, False)


def _error_of_future() -> tuple[str, bool]:
    with pytest.raises(FarpropError) as raised:
        rpc.rpc_async("worker1", f.noop).wait()
    return type(raised.value).__name__, raised.value.may_have_run


def _requests_run() -> bool:
    return int(rpc.api._get_current_rpc_agent().get_debug_info()["agent.server_active_calls"]) > 0


def _limit_the_queue(limit: int) -> None:
    admission.MOST_REQUESTS = limit


def _raise_of_a_call_of_its_own() -> None:
    raise not_run(ConnectionLostError("an inner call failed"))


def _misuse() -> None:
    rpc.rpc_sync("nobody", f.noop)


def test_errors_of_a_worker_that_refuses_or_raises() -> None:
    with cluster(2) as job:
        job.run(1, _limit_the_queue, 0)
        assert job.run(0, _error_of, f.noop) == (OverloadedError.__name__, False)
        job.run(1, _limit_the_queue, 100_000)
        assert job.run(0, _error_of, _raise_of_a_call_of_its_own) == (ConnectionLostError.__name__, True)
        assert job.run(0, _error_of, _misuse) == (UsageError.__name__, True)


def _gradient_of_a_retried_call() -> None:
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id, faults.inject() as plan:
        plan.fail_at("worker1", 1)
        future = rpc.rpc_async("worker1", torch.mul, args=(a, 3), retry=rpc.Retry(2, 0.01))
        autograd.backward(context_id, [future.wait().sum()])
        assert torch.equal(autograd.get_gradients(context_id)[a], torch.full((2,), 3.0))


def test_a_retried_call_is_made_in_the_autograd_context_of_the_first_attempt() -> None:
    with cluster(2) as job:
        job.run(0, _gradient_of_a_retried_call)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="at least once"):
        rpc.Retry(0)
    with pytest.raises(ValueError, match="0 or more seconds"):
        rpc.Retry(2, -1.0)
    with pytest.raises(UsageError, match="can't be marked as idempotent"):
        rpc.idempotent(torch.add)


def test_pauses_double_up_to_a_limit() -> None:
    retry = rpc.Retry(10, 0.1)
    for attempts, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (100, 30.0)):
        pauses = [retry.pause(attempts) for _ in range(50)]
        assert all(longest / 2 <= pause <= longest for pause in pauses)
        assert len(set(pauses)) > 1
