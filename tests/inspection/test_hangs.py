"""The ways to hang: what ``why`` says, from a worker, from the command line outside of the job, and in the error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.inspect
import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from farprop.runtime.agent_registry import current_agent
from tests.inspection import functions as f
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster

_TIMEOUT = 0.5
_GRACE = 1.0  # the promise: a call ends at its deadline plus one second
_ENV = {"FARPROP_JOB_NAME": "hangs"}


def command(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command ``farprop`` as a user would, outside of the job."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "farprop", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ,
    )


def _call(to: str, function: Callable[..., Any], args: tuple[Any, ...] = ()) -> tuple[str, list[str], Any, float]:
    """Call something that hangs. Returns the error's text, its notes, what it is about, and how long it took."""
    start = time.monotonic()
    with pytest.raises(RpcTimeoutError) as raised:
        rpc.rpc_sync(to, function, args, timeout=_TIMEOUT)
    error = raised.value
    about = error.worker, error.function, error.call_id
    return str(error), list(error.__notes__), about, time.monotonic() - start


def _sentences() -> list[str]:
    return [reason.sentence for reason in farprop.inspect.why()]


def _from_outside(pattern: str) -> None:
    """The command says it, too, as text and as JSON."""
    for text in (command("why", "hangs"), command("why", "hangs", "--json")):
        assert re.search(pattern, text.stdout), text.stdout + text.stderr
        assert "Traceback" not in text.stderr


def _check(job: Cluster, function: Callable[..., Any], pattern: str, state: str, args: tuple[Any, ...] = ()) -> None:
    """Hang, and read the sentence in the error, from a worker, and from outside."""
    waiting = job.start(0, rpc.rpc_sync, "worker1", function, args, {}, 0)
    job.run(2, f.is_running, function.__name__)
    text, notes, about, seconds = job.run(0, _call, "worker1", function, args)
    assert text.startswith("RPC ran for more than set timeout (500 ms) without an answer from worker1 to "), text
    assert function.__name__ in text
    assert state in text
    assert re.search(pattern, notes[0]), notes
    assert about[:2] == ("worker1", f"{f.__name__}:{function.__name__}")
    assert re.fullmatch(r"worker0>worker1#\d+", about[2])
    assert seconds < _TIMEOUT + _GRACE
    assert any(re.search(pattern, sentence) for sentence in job.run(0, _sentences))
    assert any(re.search(pattern, sentence) for sentence in job.run(2, _sentences))
    _from_outside(pattern)
    job.run(1, f.release)
    assert waiting.exception() is None


def test_endless_loop() -> None:
    with cluster(3, env=_ENV) as job:
        pattern = (
            r"worker0 waits for worker1\.endless \([\d.]+ s\): worker1 has been in functions\.py:\d+ `endless` for"
        )
        _check(job, f.endless, pattern, "It is still running there")


def test_future_that_is_never_set() -> None:
    with cluster(3, env=_ENV) as job:
        pattern = r"worker1\.future_that_nobody_sets has returned a future that is not done"
        _check(job, f.future_that_nobody_sets, pattern, "It is still running there")


def test_two_workers_that_wait_for_each_other_with_a_lock() -> None:
    with cluster(3, env=_ENV) as job:
        waiting = job.start(0, f.holding_a_lock, "worker1")
        job.run(2, f.is_running, "take_the_lock")
        pattern = (
            r"worker0 waits for worker1\.call_back \([\d.]+ s\), which waits for worker0\.take_the_lock \([\d.]+ s\): "
            r"worker0 has been in functions\.py:\d+ `take_the_lock` for .*: back on worker0, so this is a cycle if"
        )
        for rank in (1, 2):
            (sentence,) = job.run(rank, _sentences)
            assert re.search(pattern, sentence), sentence
        _from_outside(pattern)
        job.run(0, f.release)
        waiting.result()


def _make_two() -> None:
    """Two values, each of which is made from the other."""
    one = rpc.remote("worker1", f.fetch, ("two",))
    two = rpc.remote("worker2", f.fetch, ("one",))
    rpc.rpc_sync("worker1", f.set_reference, ("two", two))
    rpc.rpc_sync("worker2", f.set_reference, ("one", one))
    with pytest.raises(RpcTimeoutError) as raised:
        one.to_here(timeout=2)
    _notes[:] = raised.value.__notes__


_notes: list[str] = []


def _noted() -> list[str]:
    return _notes


def test_two_values_that_are_made_from_each_other_are_a_cycle() -> None:
    with cluster(3, env=_ENV, options={"num_worker_threads": 4}) as job:
        job.run(0, _make_two)
        (note,) = job.run(0, _noted)
        assert re.search(r"^worker0 waits for worker1\.to_here .*, which waits for the value that worker1\.fetch", note)
        assert "which waits for worker2.to_here" in note, note
        assert note.endswith(": a cycle"), note


@pytest.mark.parametrize("holder", ["interpreter", "stopped"])
def test_worker_that_answers_nothing(holder: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with cluster(3, env=_ENV, timeout=90) as job:
        if holder == "interpreter":
            waiting = job.start(0, rpc.rpc_sync, "worker1", f.hold_the_lock_of_the_interpreter, (str(pipe),), {}, 0)
            job.run(2, _until_silent)
            pattern = "worker1 answers nothing: stopped, or it holds the interpreter.s lock"
        else:
            waiting = job.start(0, rpc.rpc_sync, "worker1", f.wait_here, (), {}, 0)
            job.run(2, f.is_running, "wait_here")
            job.signal(1, signal.SIGSTOP)
            pattern = "worker1 answers nothing: it is stopped"
        text, notes, _, seconds = job.run(0, _call, "worker1", f.wait_here)
        assert "It may still be running there" in text
        assert re.search(pattern, notes[0]), notes
        assert seconds < _TIMEOUT + _GRACE
        assert any(re.search(pattern, sentence) for sentence in job.run(0, _sentences))
        outside = command("why", "hangs")
        assert re.search(pattern, outside.stdout), outside.stdout + outside.stderr
        assert outside.returncode == 1  # a worker did not answer
        if holder == "stopped":
            job.signal(1, signal.SIGCONT)
        else:
            pipe.open("wb").close()
        job.run(1, f.release)
        waiting.result()


def _until_silent() -> None:
    while not any(isinstance(answer, farprop.inspect.Silence) for answer in farprop.inspect.job(timeout=0.2).workers):
        time.sleep(0.01)


def test_call_that_is_queued_behind_others() -> None:
    with cluster(3, env=_ENV, options={"num_worker_threads": 2}) as job:
        waiting = [job.start(2, rpc.rpc_sync, "worker1", f.wait_here, (), {}, 0) for _ in range(2)]
        job.run(2, _until_running, 2)
        text, notes, _, seconds = job.run(0, _call, "worker1", f.has_begun)
        assert "It was queued there, and has not started" in text
        assert notes[0].endswith("worker1 has not started it: 2 of 2 threads are busy with `wait_here`"), notes
        assert seconds < _TIMEOUT + _GRACE
        job.run(1, f.release)
        for handle in waiting:
            handle.result()


def _until_running(count: int) -> None:
    while sum(row.state == "running" for row in farprop.inspect.job().calls) < count:
        time.sleep(0.005)


def _many_timeouts() -> float:
    start = time.monotonic()
    futures = [rpc.rpc_async("worker1", f.wait_here, timeout=_TIMEOUT) for _ in range(200)]
    for future in futures:
        with pytest.raises(RpcTimeoutError, match="RPC ran for more than set timeout"):
            future.wait()
    return time.monotonic() - start


def test_many_calls_that_time_out_together_ask_once() -> None:
    with cluster(2, env=_ENV) as job:
        job.run(0, rpc.rpc_sync, "worker1", f.release)
        job.signal(1, signal.SIGSTOP)
        assert job.run(0, _many_timeouts) < _TIMEOUT + _GRACE
        job.signal(1, signal.SIGCONT)


def _nested_calls() -> list[dict[str, Any]]:
    return json.loads(command("calls", "hangs", "--json").stdout)


def test_nested_calls_are_part_of_the_first() -> None:
    with cluster(3, env=_ENV) as job:
        waiting = job.start(0, f.holding_a_lock, "worker1")
        job.run(2, f.is_running, "take_the_lock")
        rows = {row["function"].rpartition(":")[2]: row for row in _nested_calls()}
        assert rows["take_the_lock"]["root"] == rows["call_back"]["id"] == rows["call_back"]["root"]
        assert rows["take_the_lock"]["caller"] == "worker1"
        assert rows["take_the_lock"]["state"] == "running"
        assert rows["take_the_lock"]["place"].startswith("functions.py:")
        job.run(0, f.release)
        waiting.result()


def _call_many_times() -> None:
    for _ in range(600):
        rpc.rpc_async("worker1", f.wait_here, timeout=0)


def _waited_for() -> list[str]:
    snapshot = current_agent().inspector.snapshots.snapshot()
    return [call.function for call in snapshot.awaited if call.is_waited_for and not call.system]


def test_call_that_a_thread_waits_for_is_not_left_out_for_older_ones() -> None:
    with cluster(2, env=_ENV) as job:
        job.run(0, _call_many_times)
        waiting = job.start(0, rpc.rpc_sync, "worker1", f.has_begun, timeout=0)
        wait_until(lambda: job.run(0, _waited_for) == [f"{f.__name__}:has_begun"])
        job.run(1, f.release)
        waiting.result()


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        f.wait_here()
        return gradient


def apply_slow(x: torch.Tensor) -> torch.Tensor:
    return _Slow.apply(x)  # type: ignore[no-any-return]


def _slow_pass() -> tuple[list[str], float]:
    with dist_autograd.context() as context:
        y = rpc.rpc_sync("worker1", apply_slow, (torch.ones(1, requires_grad=True),))
        start = time.monotonic()
        with pytest.raises(RpcTimeoutError) as raised:
            dist_autograd.backward(context, [y.sum()], timeout=_TIMEOUT)
        return list(raised.value.__notes__), time.monotonic() - start


def test_backward_pass_that_takes_too_long() -> None:
    with cluster(2, env=_ENV) as job:
        notes, seconds = job.run(0, _slow_pass)
        pattern = r"worker0 waits for worker1\.gradients .*: worker1 has been in `gradients` for .* `wait_here`"
        assert re.search(pattern, notes[0]), notes
        assert seconds < _TIMEOUT + _GRACE
        job.run(1, f.release)
