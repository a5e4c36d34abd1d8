"""Cancelled calls: what runs on the callee, what the caller gets, and what is left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import random
import signal
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import CallCancelledError, ConnectionLostError, OverloadedError
from farprop.runtime.agent_registry import current_agent
from farprop.wire.message import Method, cancel
from tests.calls import functions as f
from tests.support.workers import cluster

ONE_THREAD = {"num_worker_threads": 1}


def _until_nothing_is_left(worker: str) -> None:
    deadline = time.monotonic() + 30
    while (left := rpc.rpc_sync(worker, f.served_state)) != (0, 0, 0):
        assert time.monotonic() < deadline, left


def _assert_cancelled(future: Any) -> None:
    assert future.done()
    assert future.cancelled()
    assert not future.cancel()
    for _ in range(2):
        with pytest.raises(CallCancelledError) as raised:
            future.wait()
        assert isinstance(raised.value, concurrent.futures.CancelledError)
        assert "was cancelled here" in str(raised.value)

    async def awaits() -> None:
        with pytest.raises(asyncio.CancelledError):
            await future

    asyncio.run(awaits())


_held: list[Any] = []


def _round_trip(rank: int) -> None:
    """A request of farprop's own, which does not wait for a thread: the worker has read all that was sent before it."""
    agent = current_agent()
    message = agent.dialect.encode_call(None, (1,), {})
    agent.peers.call_method(rank, Method.CONTEXT_EXISTS, message, 30.0, system=True)


def _cancel_what_waits(to: str) -> None:
    """The only thread of the callee waits at the gate."""
    _held[:] = [rpc.rpc_async(to, f.wait_for_gate_and_note, args=("first",))]
    queued = rpc.rpc_async(to, f.note, args=("queued",))
    big = rpc.rpc_async(to, f.note, args=(torch.zeros(1 << 20),))
    made = rpc.remote(to, f.note, args=("made",))
    for future in (queued, big, made._get_future()):
        assert future.cancel()
        _assert_cancelled(future)
    with pytest.raises(CallCancelledError, match="note on worker"):
        queued.wait()
    with pytest.raises(CallCancelledError):
        made.to_here()
    _round_trip(rpc.get_worker_info(to).id)


def _what_has_run(to: str) -> list[Any]:
    (held,) = _held
    held.wait()
    assert not held.cancel()
    assert not held.cancelled()
    _until_nothing_is_left(to)
    return rpc.rpc_sync(to, f.noted)  # type: ignore[no-any-return]


@pytest.mark.without_tls_too
def test_what_has_not_begun_never_runs(env: dict[str, str]) -> None:
    with cluster(2, env, options=ONE_THREAD) as c:
        for rank in (1, 0):
            c.run(0, _cancel_what_waits, f"worker{rank}")
            c.run(rank, f.open_gate)
            assert c.run(0, _what_has_run, f"worker{rank}") == ["first"]


def _cancel_large_requests_on_their_way(stopped: int) -> None:
    _held[:] = [rpc.rpc_async("worker1", f.wait_for_gate_and_note, args=("first",))]
    large = [rpc.rpc_async("worker1", f.note, args=(torch.zeros(4 << 20),)) for _ in range(4)]
    assert current_agent().peers.connections["worker1"].outbox_bytes > 16 << 20
    for future in large:
        assert future.cancel()
    os.kill(stopped, signal.SIGCONT)
    _round_trip(1)


@pytest.mark.one_transport
def test_requests_that_are_not_sent_yet_are_cancelled() -> None:
    with cluster(2, {"FARPROP_TRANSPORT": "tcp"}, options=ONE_THREAD) as c:
        c.run(0, rpc.rpc_sync, "worker1", f.noop)
        c.signal(1, signal.SIGSTOP)
        c.run(0, _cancel_large_requests_on_their_way, c.pid(1))
        c.run(1, f.open_gate)
        assert c.run(0, _what_has_run, "worker1") == ["first"]


def _cancel_what_runs() -> None:
    to = "worker1"
    coroutine = rpc.rpc_async(to, f.coroutine_until_cancelled, args=(1,))
    rpc.rpc_sync(to, f.wait_until_noted, args=(("begins", 1),))
    assert coroutine.cancel()
    _assert_cancelled(coroutine)
    rpc.rpc_sync(to, f.wait_until_noted, args=(("cancelled", 1),))

    stubborn = rpc.rpc_async(to, f.coroutine_that_ignores_cancels)
    rpc.rpc_sync(to, f.wait_until_noted, args=("begins",))
    assert stubborn.cancel()
    rpc.rpc_sync(to, f.wait_until_noted, args=("goes on",))

    thread = rpc.rpc_async(to, _big_result)
    rpc.rpc_sync(to, f.wait_until_noted, args=("big",))
    assert thread.cancel()
    _assert_cancelled(thread)
    rpc.rpc_sync(to, f.open_gate)
    _until_nothing_is_left(to)
    _until_no_result_is_left(to)

    futures = rpc.rpc_async(to, _relay, args=("worker0", "chained"))
    f.wait_until_noted(("begins", "chained"))
    assert futures.cancel()
    f.wait_until_noted(("cancelled", "chained"))
    method = rpc.remote(to, _Relay).rpc_async().relay("worker0", "by proxy")
    f.wait_until_noted(("begins", "by proxy"))
    assert method.cancel()
    f.wait_until_noted(("cancelled", "by proxy"))
    _until_nothing_is_left(to)


_results: list[weakref.ref[Any]] = []


class _Result(dict[str, Any]):
    """A value that can be watched."""


def _big_result() -> Any:
    f.ran.append("big")
    assert f.gate.wait(30)
    result = _Result(tensor=torch.zeros(1 << 20), reference=rpc.RRef(torch.ones(2)))
    _results.append(weakref.ref(result))
    return result


def _until_no_result_is_left(worker: str) -> None:
    """The thread that made it may still be on its way out of the function."""
    deadline = time.monotonic() + 30
    while (left := rpc.rpc_sync(worker, _results_left)) != (0, "0", 0):
        assert time.monotonic() < deadline, left


def _results_left() -> tuple[int, str, int]:
    """Results that are alive, values that others refer to, and shared memory that the caller has borrowed."""
    gc.collect()
    agent = current_agent()
    lent = sum(connection.sender.lent_bytes for connection in agent._accepted.all())
    return (
        sum(result() is not None for result in _results),
        rpc.api._rref_context_get_debug_info()["num_owner_rrefs"],
        lent,
    )


@rpc.functions.async_execution
def _relay(to: str, value: str) -> torch.futures.Future[Any]:
    return rpc.rpc_async(to, f.coroutine_until_cancelled, args=(value,))


class _Relay:
    @rpc.functions.async_execution
    def relay(self, to: str, value: str) -> torch.futures.Future[Any]:
        return rpc.rpc_async(to, f.coroutine_until_cancelled, args=(value,))


@pytest.mark.without_tls_too
def test_what_has_begun_is_stopped_or_its_result_is_dropped(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _cancel_what_runs)


def _cancel_under_a_waiting_thread() -> list[str]:
    found: list[str] = []
    for to in ("worker1", "worker0"):
        future = rpc.rpc_async(to, f.wait_for_gate)
        waiting = threading.Thread(target=_note_error_of, args=(future, found))
        waiting.start()
        while getattr(future.call, "waiter", None) is None:
            time.sleep(0.001)
        assert future.cancel()
        waiting.join(30)
        found.append("waits" if waiting.is_alive() else "ended")
    f.gate.set()
    rpc.rpc_sync("worker1", f.open_gate)
    return found


def _note_error_of(future: Any, found: list[str]) -> None:
    try:
        future.wait()
    except CallCancelledError as error:
        found.append(f"{error.function} on {error.worker}")


def test_thread_that_waits_is_told(env: dict[str, str]) -> None:
    name = "tests.calls.functions:wait_for_gate"
    with cluster(2, env) as c:
        assert c.run(0, _cancel_under_a_waiting_thread) == [
            f"{name} on worker1",
            "ended",
            f"{name} on worker0",
            "ended",
        ]


def _cancel_all(futures: list[Any]) -> None:
    for future in futures:
        future.cancel()


def _race() -> tuple[int, int]:
    """Cancel calls while their answers arrive."""
    chance = random.Random(7)
    answered = cancelled = 0
    for _ in range(30):
        to = chance.choice(("worker0", "worker1"))
        made = [rpc.rpc_async(to, chance.choice((f.add, f.coroutine)), args=(1,)) for _ in range(20)]
        chance.shuffle(made)
        threads = [threading.Thread(target=_cancel_all, args=(part,)) for part in (made[::2], made[1::3])]
        for thread in threads:
            thread.start()
        for future in made:
            try:
                assert future.wait() == 2
                assert not future.cancelled()
                answered += 1
            except CallCancelledError:
                assert future.cancelled()
                cancelled += 1
        for thread in threads:
            thread.join()
    for worker in ("worker1", "worker0"):
        _until_nothing_is_left(worker)
    return answered, cancelled


def test_cancels_that_cross_answers(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        answered, cancelled = c.run(0, _race)
        assert answered
        assert cancelled
        assert answered + cancelled == 600


def _call_two_workers() -> None:
    _held[:] = [rpc.rpc_async(to, f.wait_for_gate) for to in ("worker1", "worker2")]
    rpc.rpc_sync("worker1", f.noop)
    rpc.rpc_sync("worker2", f.noop)


def _cancel_calls_of_the_stopped_and_the_dead(stopped: int) -> None:
    to_stopped, to_killed = _held
    assert to_stopped.cancel()
    _assert_cancelled(to_stopped)
    os.kill(stopped, signal.SIGCONT)
    if to_killed.cancel():
        _assert_cancelled(to_killed)
    with pytest.raises((CallCancelledError, ConnectionLostError)):
        to_killed.wait()
    with pytest.raises(ConnectionLostError):
        rpc.rpc_sync("worker2", f.noop)
    after = rpc.rpc_async("worker2", f.noop)
    assert not after.cancel()
    assert not after.cancelled()
    with pytest.raises(ConnectionLostError):
        after.wait()
    rpc.rpc_sync("worker1", f.open_gate)
    _until_nothing_is_left("worker1")


@pytest.mark.one_transport
def test_callee_is_stopped_or_dead() -> None:
    with cluster(3) as c:
        c.run(0, _call_two_workers)
        c.signal(1, signal.SIGSTOP)
        c.kill(2)
        c.run(0, _cancel_calls_of_the_stopped_and_the_dead, c.pid(1))


def _cancel_with_retries() -> None:
    attempt = rpc.rpc_async("worker1", f.coroutine_until_cancelled, args=("attempt",), retry=rpc.Retry(3))
    rpc.rpc_sync("worker1", f.wait_until_noted, args=(("begins", "attempt"),))
    assert attempt.cancel()
    _assert_cancelled(attempt)
    rpc.rpc_sync("worker1", f.wait_until_noted, args=(("cancelled", "attempt"),))
    # A long pause follows the first attempt.
    pausing = rpc.rpc_async("worker1", _overloaded, retry=rpc.Retry(3, backoff=60.0), timeout=0)
    rpc.rpc_sync("worker1", f.wait_until_noted, args=("overloaded",))
    with pytest.raises(OverloadedError):
        pausing.call.current.wait()
    assert pausing.cancel()
    _assert_cancelled(pausing)
    last = rpc.rpc_async("worker1", f.add, args=(1,), retry=rpc.Retry(3))
    assert last.wait() == 2
    assert not last.cancel()
    assert rpc.rpc_sync("worker1", f.noted).count("overloaded") == 1
    _until_nothing_is_left("worker1")


@rpc.idempotent
def _overloaded() -> None:
    f.ran.append("overloaded")
    raise OverloadedError("try again")


@pytest.mark.one_transport
def test_call_with_retries_is_cancelled() -> None:
    with cluster(2) as c:
        c.run(0, _cancel_with_retries)


def _cancel_ids_of_others() -> None:
    connection = current_agent().peers.connect("worker1")
    for call_id in range(200):
        connection.send(cancel(call_id))


def _others_cancel() -> str:
    future = rpc.rpc_async("worker1", f.wait_for_gate)
    coroutine = rpc.rpc_async("worker1", f.coroutine_at_gate, args=(5,))
    rpc.rpc_sync("worker1", f.noop)
    rpc.rpc_sync("worker2", _cancel_ids_of_others)
    rpc.rpc_sync("worker2", rpc.rpc_sync, args=("worker1", f.open_gate))
    assert coroutine.wait() == 5
    _until_nothing_is_left("worker1")
    return str(future.wait())


@pytest.mark.one_transport
def test_nobody_cancels_the_calls_of_others() -> None:
    with cluster(3) as c:
        assert c.run(0, _others_cancel) == "through"


def _pass_with_cancelled_calls(mode: str) -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        never = rpc.rpc_async("worker1", f.coroutine_until_cancelled, args=(x,))
        never_made = rpc.remote("worker1", f.coroutine_until_cancelled, args=(x,))
        assert never.cancel()
        assert never_made._get_future().cancel()
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 3.0)).sum()
        dist_autograd.backward(context_id, [loss], mode=mode, timeout=20)
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.full((2,), 3.0))
    _until_nothing_is_left("worker1")


@pytest.mark.one_transport
def test_backward_pass_does_not_wait_for_cancelled_calls() -> None:
    with cluster(2) as c:
        for mode in ("smart", "fast"):
            c.run(0, _pass_with_cancelled_calls, mode)
