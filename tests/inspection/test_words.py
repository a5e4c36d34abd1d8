"""What errors, logs and reprs say."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import CallCancelledError, ConnectionLostError, FarpropError, RpcTimeoutError
from tests.inspection import functions as f
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport

_records: list[logging.LogRecord] = []


class _Recording(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _records.append(record)


def _record(level: int = logging.INFO) -> None:
    logger = logging.getLogger("farprop")
    logger.setLevel(level)
    logger.addHandler(_Recording())
    logger.propagate = False


def _recorded() -> list[tuple[str, str, bool]]:
    """Level, text and whether there is a traceback."""
    found = [(record.levelname, record.getMessage(), record.exc_info is not None) for record in _records]
    _records.clear()
    return found


def _catch() -> None:
    with pytest.raises(ValueError, match="no such thing"):
        rpc.rpc_sync("worker1", f.raise_value_error)
    with pytest.raises(ValueError, match="no such thing"):
        rpc.rpc_async("worker1", f.raise_value_error).wait()


def _fetch_failed() -> None:
    reference = rpc.remote("worker1", f.raise_value_error)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such thing"):
            reference.to_here()


def test_exception_of_a_called_function_is_one_line_where_it_ran() -> None:
    with cluster(2) as job:
        for rank in (0, 1):
            job.run(rank, _record)
        job.run(0, _catch)
        said = "raise_value_error, called by worker0, raised ValueError('no such thing')"
        lines = job.run(1, _recorded)
        assert [(level, has_traceback) for level, _, has_traceback in lines] == [("WARNING", False)] * 2
        assert all(text.endswith(said) for _, text, _ in lines)
        job.run(0, _fetch_failed)
        ((level, text, has_traceback),) = job.run(1, _recorded)  # not again for every fetch
        assert (level, has_traceback) == ("WARNING", False)
        assert text.endswith(said)
        assert job.run(0, _recorded) == []
        job.run(1, _record, logging.DEBUG)
        job.run(0, _catch)
        assert any("raised ValueError" in text and traced for _, text, traced in job.run(1, _recorded))


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient")


def apply_fail(x: torch.Tensor) -> torch.Tensor:
    return Fail.apply(x)  # type: ignore[no-any-return]


def _fail_backward() -> None:
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", apply_fail, (torch.ones(1, requires_grad=True),))
        with pytest.raises(RuntimeError, match="no gradient"):
            dist_autograd.backward(context, [y.sum()])


def test_failed_pass_is_no_traceback_on_the_other_worker() -> None:
    with cluster(2) as job:
        for rank in (0, 1):
            job.run(rank, _record)
        job.run(0, _fail_backward)
        assert not any(traced for rank in (0, 1) for _, _, traced in job.run(rank, _recorded))


def _attributes(error: FarpropError) -> tuple[Any, Any, Any]:
    return error.worker, error.function, error.call_id


def _errors_of_a_dead_worker() -> list[tuple[Any, Any, Any]]:
    found = []
    for make in (
        lambda: rpc.rpc_sync("worker1", f.wait_here, timeout=20),
        lambda: rpc.rpc_async("worker1", f.wait_here, timeout=20).wait(),
    ):
        with pytest.raises(ConnectionLostError) as raised:
            make()
        found.append(_attributes(raised.value))
    return found


def _lose(to: str) -> tuple[Any, Any, Any]:
    with pytest.raises(ConnectionLostError) as raised:
        rpc.rpc_sync(to, f.wait_here, timeout=30)
    return _attributes(raised.value)


def test_errors_of_calls_name_worker_function_and_call() -> None:
    with cluster(3, check=False) as job:
        lost = job.start(0, _lose, "worker1")
        job.run(2, f.is_running, "wait_here")
        job.kill(1)
        worker, function, call_id = lost.result()
        assert (worker, function) == ("worker1", f"{f.__name__}:wait_here")
        assert re.fullmatch(r"worker0>worker1#\d+", call_id)
        for worker, function, _ in job.run(0, _errors_of_a_dead_worker):
            assert worker == "worker1"
            assert function in (f"{f.__name__}:wait_here", None)
    assert _attributes(RpcTimeoutError("made by hand")) == (None, None, None)


def _lambda_times_out() -> tuple[Any, str]:
    with pytest.raises(RpcTimeoutError) as raised:
        rpc.rpc_sync("worker1", lambda: f.wait_here(), timeout=0.3)
    return raised.value.function, raised.value.__notes__[0]


def _future_reprs() -> tuple[str, str, str]:
    future = rpc.rpc_async("worker1", f.wait_here, timeout=0)
    before = repr(future)
    rpc.rpc_sync("worker1", f.release)
    future.wait()
    return before, repr(future), repr(type(future)())


def test_names_of_functions_without_a_name_and_of_futures() -> None:
    with cluster(2) as job:
        function, note = job.run(0, _lambda_times_out)
        assert function == "_lambda_times_out.<locals>.<lambda>"
        assert "worker1._lambda_times_out.<locals>.<lambda>" in note
        pending, done, empty = job.run(0, _future_reprs)
        start = rf"<Future of {re.escape(f.__name__)}:wait_here on worker1: "
        assert re.fullmatch(start + r"pending, [\d.]+ s old>", pending)
        assert re.fullmatch(start + r"done, [\d.]+ s old>", done)
        assert empty == "<Future: pending>"


def _errors_of_methods() -> list[str]:
    """What a program sees of calls of methods of a reference's value."""
    rref = rpc.remote("worker1", Waiting)
    rref.to_here()
    with pytest.raises(RpcTimeoutError) as raised:
        rref.rpc_sync(timeout=0.3).wait()
    future = rref.rpc_async().wait()
    texts = [str(raised.value), *raised.value.__notes__[:1], str(raised.value.function), repr(future)]
    future.cancel()
    with pytest.raises(CallCancelledError) as cancelled:
        future.wait()
    with pytest.raises(AttributeError):
        rref.rpc_sync().nothing()
    rpc.rpc_sync("worker1", f.release)
    return [*texts, str(cancelled.value)]


class Waiting:
    def wait(self) -> None:
        f.wait_here()


def test_calls_of_methods_are_shown_by_the_method() -> None:
    with cluster(2) as job:
        job.run(1, _record)
        timeout, note, function, shown, cancelled = job.run(0, _errors_of_methods)
        assert "from worker1 to wait. It is still running there" in timeout
        assert "worker1.wait " in note
        assert function == "wait"
        assert shown.startswith("<Future of wait on worker1: pending")
        assert cancelled.startswith("The call of wait on worker1 was cancelled")
        assert any("worker1 (rank 1): nothing, called by worker0, raised" in line for line in job.run(1, _lines))


def _shut_down() -> None:
    rpc.shutdown()


def _lines() -> list[str]:
    return [text for _, text, _ in _recorded()]


def test_shutdown_says_what_it_waits_for() -> None:
    with cluster(3) as job:
        for rank in (0, 1):
            job.run(rank, _record)
        stuck = job.start(2, f.wait_here)
        ending = [job.start(rank, _shut_down) for rank in (0, 1)]
        # Followers wait for the leader, which is worker0; both say who is late.
        for rank in (0, 1):
            line = job.run(rank, _wait_for_a_line)
            assert re.search(
                rf"worker{rank} \(rank {rank}\): shutdown has waited [\d.]+ s for worker2 to call shutdown: the main "
                r"thread of worker2 is in functions\.py:\d+ `wait_here`, asleep",
                line,
            ), line
        job.run(2, f.release)
        stuck.result()
        last = job.start(2, _shut_down)
        for handle in (*ending, last):
            handle.result()


def _wait_for_a_line() -> str:
    import time

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        for record in _records:
            if "shutdown has waited" in record.getMessage():
                return record.getMessage()
        time.sleep(0.01)
    raise AssertionError([record.getMessage() for record in _records])
