"""Nested calls, many threads, and slow functions beside fast ones."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.references.rref_context import RRefContext
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.support import lock_order
from tests.support.workers import cluster


@pytest.fixture(autouse=True)
def _check_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lock_order.VARIABLE, "1")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_two_hundred_nested_calls_run_on_four_threads(env: dict[str, str], mode: str) -> None:
    with cluster(2, env, options={"num_worker_threads": 4}) as c:
        assert c.run(0, f.chain, 200, "worker0", "worker1", mode) == 200


def _many_chains(depth: int) -> int:
    futures = [rpc.rpc_async("worker1", f.chain, args=(depth, "worker1", "worker0", "sync")) for _ in range(10)]
    return sum(torch.futures.wait_all(futures))


def test_call_chains_from_both_workers_at_once(env: dict[str, str]) -> None:
    with cluster(2, env, options={"num_worker_threads": 2}) as c:
        other = c.start(1, f.chain, 40, "worker1", "worker0", "sync")
        assert c.run(0, _many_chains, 20) == 200
        assert other.result() == 40


def _twenty_threads() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(100):
                to = f"worker{1 + (number + i) % 2}"
                if i % 3 == 0:
                    assert rpc.rpc_async(to, f.add, args=(number, i)).wait() == number + i
                elif i % 3 == 1:
                    tensor = torch.full((20_000,), float(number))
                    assert torch.equal(rpc.rpc_sync(to, f.identity, args=(tensor,)), tensor)
                else:
                    assert rpc.rpc_sync(to, f.add, args=(number, i)) == number + i
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_twenty_threads_at_once(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _twenty_threads)


def _fast_beside_slow() -> None:
    slow = [rpc.rpc_async("worker1", f.wait_for_gate) for _ in range(3)]
    for i in range(50):
        assert rpc.rpc_sync("worker1", f.add, args=(i,)) == i + 1
    assert not any(future.done() for future in slow)
    rpc.rpc_sync("worker1", f.open_gate)
    assert torch.futures.wait_all(slow) == ["through"] * 3


def test_slow_functions_do_not_delay_fast_ones(env: dict[str, str]) -> None:
    with cluster(2, env, options={"num_worker_threads": 4}) as c:
        c.run(0, _fast_beside_slow)


_now_running = 0
_most_running = 0
_lock = threading.Lock()


def _count_running(barrier_seconds: float) -> int:
    global _now_running, _most_running
    with _lock:
        _now_running += 1
        _most_running = max(_most_running, _now_running)
    f.sleep(barrier_seconds)
    with _lock:
        _now_running -= 1
    return _most_running


def _limit_holds() -> None:
    futures = [rpc.rpc_async("worker1", _count_running, args=(0.02,)) for _ in range(30)]
    assert max(torch.futures.wait_all(futures)) == 3


def test_no_more_than_num_worker_threads_run_at_once() -> None:
    with cluster(2, options={"num_worker_threads": 3}) as c:
        c.run(0, _limit_holds)


def _callbacks_may_call() -> None:
    def again(future: Any) -> Any:
        return (
            rpc.rpc_sync("worker1", f.add, args=(future.wait(), 1))
            + rpc.rpc_async("worker1", f.add, args=(1, 1)).wait()
        )

    futures = [rpc.rpc_async("worker1", f.add, args=(i, 1)).then(again) for i in range(20)]
    assert torch.futures.wait_all(futures) == [i + 4 for i in range(20)]


def test_callbacks_of_futures_may_make_calls_and_wait(env: dict[str, str]) -> None:
    with cluster(2, env, options={"num_worker_threads": 1}) as c:
        c.run(0, _callbacks_may_call)


def _in_flight() -> None:
    futures = [rpc.rpc_async("worker1", f.add, args=(i,)) for i in range(5000)]
    assert torch.futures.wait_all(futures) == list(range(1, 5001))


def test_five_thousand_calls_in_flight(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _in_flight)


_flood_futures: list[Any] = []


def _flood_and_keep(count: int) -> None:
    _flood_futures.extend(rpc.rpc_async("worker0", f.wait_for_gate_and_note, args=("flood",)) for _ in range(count))


def _await_flood() -> None:
    torch.futures.wait_all(_flood_futures)
    _flood_futures.clear()


def test_a_flood_of_one_caller_does_not_keep_another_waiting(env: dict[str, str]) -> None:
    with cluster(3, env, options={"num_worker_threads": 1}) as c:
        c.run(1, _flood_and_keep, 3000)
        wait_until(lambda: int(c.run(0, f.debug_info)["agent.num_pending_requests"]) == 2999)
        ping = c.start(2, rpc.rpc_sync, "worker0", f.note, ("ping",))
        wait_until(lambda: int(c.run(0, f.debug_info)["agent.num_pending_requests"]) == 3000)
        c.run(0, f.open_gate)
        ping.result()
        c.run(1, _await_flood)
        assert c.run(0, f.noted).index("ping") < 20


_callback_runs, _callback_may_end = threading.Event(), threading.Event()


def _call_with_callback() -> None:
    def callback(_: Any) -> None:
        _callback_runs.set()
        assert _callback_may_end.wait(30)

    _flood_futures.append(rpc.rpc_async("worker1", f.wait_for_gate_and_note, args=("called",)).then(callback))


def _is_idle_while_the_answer_comes() -> bool:
    settled = RRefContext.settled

    def settled_slowly(references: RRefContext) -> bool:
        assert _callback_runs.wait(30)  # this thread is not scheduled for a while
        return settled.fget(references)  # type: ignore[attr-defined,no-any-return]

    RRefContext.settled = property(settled_slowly)  # type: ignore[assignment,method-assign]
    try:
        return current_agent().idle
    finally:
        RRefContext.settled = settled  # type: ignore[method-assign]
        _callback_may_end.set()


def test_worker_is_not_idle_while_an_answer_goes_from_its_call_to_its_callback() -> None:
    """A graceful shutdown stopped the worker under callbacks, and their calls failed."""
    with cluster(2) as c:
        c.run(0, _call_with_callback)
        looks = c.start(0, _is_idle_while_the_answer_comes)
        c.run(1, f.open_gate)
        assert not looks.result()
        c.run(0, _await_flood)
