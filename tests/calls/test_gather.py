"""``_all_gather`` and ``_barrier``: the order in which workers finish, and failures of one worker."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RpcTimeoutError, UsageError
from farprop.rpc import api
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.support.workers import cluster, run_workers

pytestmark = pytest.mark.one_transport

_was_asked = threading.Event()
_confirmed = threading.Event()


def _start(rank: int, world_size: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)


def _has_confirmed() -> bool:
    try:
        return _confirmed.is_set()
    finally:
        _was_asked.set()


def _gather_with_one_slow_follower(rank: int) -> bool | None:
    _start(rank, 3)
    broadcast = api._broadcast_to_followers

    def confirm_late(*args: Any) -> None:
        broadcast(*args)
        _was_asked.wait(0.2)  # no call arrives while the others wait for this worker, as they should
        _confirmed.set()

    if rank == 2:
        api._broadcast_to_followers = confirm_late
    rpc.api._all_gather(rank)
    seen = rpc.rpc_sync("worker2", _has_confirmed) if rank == 1 else None
    api._broadcast_to_followers = broadcast
    rpc.shutdown()
    return seen


def test_no_worker_leaves_a_gather_before_all_have_the_values() -> None:
    assert run_workers(_gather_with_one_slow_follower, 3)[1] is True


def _gather_and_be_called(rank: int, late: int) -> list[str]:
    """The worker ``late`` leaves the gather only when a call of the other one has arrived and is held."""
    _start(rank, 2)
    ran_before: list[str] = []
    if rank == late:
        gate = current_agent().gate
        open_gate = gate.open

        def open_late(key: Any) -> None:
            end = time.monotonic() + 20
            while not gate._held and not f.ran and time.monotonic() < end:
                time.sleep(0.001)
            ran_before.extend(f.ran)
            open_gate(key)

        gate.open = open_late  # type: ignore[method-assign]
        assert api._all_gather(rank) == {"worker0": 0, "worker1": 1}
        gate.open = open_gate  # type: ignore[method-assign]
    else:
        api._all_gather(rank)
        rpc.rpc_sync(f"worker{late}", f.note, args=("called",))
    rpc.shutdown()
    assert f.ran == (["called"] if rank == late else [])
    return ran_before


@pytest.mark.parametrize("late", [0, 1])
def test_a_call_after_a_gather_waits_until_the_callee_has_left_it(late: int) -> None:
    assert run_workers(_gather_and_be_called, 2, args=(late,))[late] == []


def _gather_from_threads(rank: int) -> None:
    _start(rank, 3)
    groups = [{"worker0", "worker1"}, {"worker1", "worker2"}, {"worker0", "worker2"}, {"worker0", "worker1", "worker2"}]
    found: list[Any] = []

    def gather(names: set[str], index: int) -> None:
        for turn in range(20):
            values = api._all_gather((index, turn), names)
            found.append(values == dict.fromkeys(names, (index, turn)))

    threads = [
        threading.Thread(target=gather, args=(names, index))
        for index, names in enumerate(groups)
        if f"worker{rank}" in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 60
    rpc.shutdown()


def test_several_threads_can_gather_at_once() -> None:
    run_workers(_gather_from_threads, 3)


def _gather(timeout: float) -> Any:
    try:
        return api._all_gather("word", timeout=timeout)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("timeout", [0, 1e12])
def test_a_timeout_of_zero_or_of_many_years_never_expires(timeout: float) -> None:
    with cluster(2) as job:
        calls = [job.start(rank, _gather, timeout) for rank in range(2)]
        assert [call.result() for call in calls] == [{"worker0": "word", "worker1": "word"}] * 2


def test_a_worker_that_dies_ends_the_gather_on_all_workers() -> None:
    with cluster(3) as job:
        others = [job.start(rank, _gather, -1) for rank in (0, 1)]
        job.run(1, f.note, "here")  # the follower is in the gather, or just before it: both must end
        job.kill(2)
        (kind, text), (follower_kind, follower_text) = [other.result() for other in others]
        assert kind is ConnectionLostError
        assert "worker2" in text
        assert follower_kind in (ConnectionLostError, UsageError)
        assert "gather 0 of worker0, worker1, worker2: " in follower_text
        assert "worker2" in follower_text


def test_a_leader_that_times_out_tells_waiting_and_late_followers() -> None:
    with cluster(3) as job:
        waiting = job.start(1, _gather, -1)
        reason = "timed out in _all_gather after 0.30 seconds."
        kind, text = job.run(0, _gather, 0.3)
        assert kind is RpcTimeoutError
        assert text.endswith(reason)
        kind, text = waiting.result()
        assert kind in (RpcTimeoutError, UsageError)
        assert text.endswith(reason)
        assert job.run(2, _gather, -1) == (
            UsageError,
            f"worker2 came too late: worker0 has finished gather 0 of worker0, worker1, worker2: {reason_of(text)}",
        )
        again = [job.start(rank, _gather, -1) for rank in range(3)]
        assert [call.result() for call in again] == [dict.fromkeys(("worker0", "worker1", "worker2"), "word")] * 3


def reason_of(failure: str) -> str:
    """The reason in the text of a failure, without its prefix."""
    return failure.partition("worker2: ")[2]


def _gather_that_needs_a_held_call(rank: int) -> None:
    """The last follower makes a call before it confirms, and the gate of the gather holds that call."""
    _start(rank, 3)
    broadcast = api._broadcast_to_followers

    def call_and_broadcast(*args: Any) -> None:
        rpc.rpc_sync("worker1", f.note, args=("needed",))
        broadcast(*args)

    if rank == 2:
        api._broadcast_to_followers = call_and_broadcast
    api._all_gather(rank)
    api._broadcast_to_followers = broadcast
    rpc.shutdown()
    assert f.ran == (["needed"] if rank == 1 else [])


def test_held_calls_run_if_a_slow_follower_needs_them() -> None:
    run_workers(_gather_that_needs_a_held_call, 3)
