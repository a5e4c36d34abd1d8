"""Callers that send more than a worker runs: what is under way has a limit, and callers wait or get an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import OverloadedError, RpcTimeoutError
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.security.raw import memory
from tests.support import lock_order
from tests.support.workers import Cluster, cluster

MIB = 1 << 20
LIMIT = 8 * MIB

_futures: list[Any] = []
_sent: list[int] = []


@pytest.fixture(autouse=True)
def _check_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lock_order.VARIABLE, "1")


def _limited(env: dict[str, str], **more: str) -> dict[str, str]:
    return {**env, "FARPROP_IN_FLIGHT_BYTES": str(LIMIT), "FARPROP_SHM_POOL_BYTES": "0", **more}


def _flood(to: str, count: int) -> None:
    """Send requests of 1 MiB each, the first of which waits for the gate."""
    tensor = torch.zeros(MIB, dtype=torch.uint8)
    _futures.append(rpc.rpc_async(to, f.wait_for_gate, timeout=0))
    for number in range(count):
        _futures.append(rpc.rpc_async(to, len, args=(tensor,), timeout=0))
        _sent.append(number)


def _sent_so_far() -> int:
    return len(_sent)


def _open_bytes(to: str) -> int:
    return current_agent().peers.connect(to)._calls.bytes


def _all_answered() -> int:
    for future in _futures:
        future.wait()
    count = len(_futures)
    _futures.clear()
    return count


def _until_full(c: Cluster, rank: int, to: str) -> None:
    wait_until(lambda: c.run(rank, _open_bytes, to) > LIMIT)


@pytest.mark.parametrize("to", ["worker0", "worker1"])
def test_memory_of_both_sides_stays_within_the_limit_in_a_flood(env: dict[str, str], to: str) -> None:
    with cluster(2, _limited(env), options={"num_worker_threads": 1}) as c:
        c.run(1, rpc.rpc_sync, to, f.noop)
        before = [memory(c.pid(rank)) for rank in range(2)]
        flood = c.start(1, _flood, to, 300)
        _until_full(c, 1, to)
        full = c.run(1, _sent_so_far)
        assert full <= LIMIT // MIB + 2
        assert c.run(1, _open_bytes, to) <= LIMIT + 2 * MIB
        c.run(int(to[-1]), f.open_gate)
        flood.result()
        assert [memory(c.pid(rank)) - earlier < 100 * MIB for rank, earlier in enumerate(before)] == [True, True]
        assert c.run(1, _all_answered) == 301


def _overload(to: str) -> str:
    _flood(to, 30)
    done = [future for future in _futures if future.done()]
    errors = []
    for future in done:
        try:
            future.wait()
        except OverloadedError as error:
            errors.append(str(error))
    assert 20 <= len(errors) <= 24
    with pytest.raises(OverloadedError):
        rpc.rpc_sync(to, f.noop)
    with pytest.raises(OverloadedError):
        rpc.remote(to, f.noop).to_here()
    _futures[:] = [future for future in _futures if future not in done]
    return errors[0]


def test_calls_over_the_limit_raise_if_the_settings_say_so(env: dict[str, str]) -> None:
    with cluster(2, _limited(env, FARPROP_WHEN_FULL="raise"), options={"num_worker_threads": 1}) as c:
        assert f"FARPROP_IN_FLIGHT_BYTES={LIMIT}" in c.run(1, _overload, "worker0")
        c.run(0, f.open_gate)
        c.run(1, _all_answered)
        assert c.run(1, rpc.rpc_sync, "worker0", f.add, (1,)) == 2


def _late() -> None:
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker0", f.noop, timeout=0.3)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_async("worker0", f.noop, timeout=0.3).wait()


def test_a_call_that_waits_for_room_ends_at_its_deadline(env: dict[str, str]) -> None:
    with cluster(2, _limited(env), options={"num_worker_threads": 1}) as c:
        flood = c.start(1, _flood, "worker0", 30)
        _until_full(c, 1, "worker0")
        c.run(1, _late)
        c.run(0, f.open_gate)
        flood.result()
        c.run(1, _all_answered)


def _call_back_and_forth(depth: int) -> int:
    """Each of these calls is nested in the one before."""
    if not depth:
        return 0
    to = "worker1" if rpc.get_worker_info().id == 0 else "worker0"
    return 1 + rpc.rpc_sync(to, _call_back_and_forth, args=(depth - 1,), timeout=30)


async def _call_from_a_coroutine(depth: int) -> int:
    to = "worker1" if rpc.get_worker_info().id == 0 else "worker0"
    return await rpc.rpc_async(to, _call_back_and_forth, args=(depth,), timeout=30) if depth else 0


async def _call_from_a_thread_of_a_coroutine(depth: int) -> int:
    return await asyncio.to_thread(_call_back_and_forth, depth)


def _flood_back_and_forth(function: Any) -> list[int]:
    padding = torch.zeros(MIB, dtype=torch.uint8)
    futures = [rpc.rpc_async("worker0", function, args=(3,), timeout=30) for _ in range(20)]
    futures += [rpc.rpc_async("worker0", f.identity, args=(padding,), timeout=30) for _ in range(20)]
    return [future.wait() for future in futures[:20]]


@pytest.mark.parametrize("function", [_call_back_and_forth, _call_from_a_coroutine, _call_from_a_thread_of_a_coroutine])
def test_nested_calls_get_through_when_both_sides_are_full(env: dict[str, str], function: Any) -> None:
    tight = {**_limited(env), "FARPROP_IN_FLIGHT_BYTES": "2000"}  # two small calls
    with cluster(2, tight, options={"num_worker_threads": 2}) as c:
        flood = c.start(1, _flood_back_and_forth, function)
        assert flood.result() == [3] * 20


def test_callers_that_wait_for_room_learn_of_the_death_of_the_worker(env: dict[str, str]) -> None:
    with cluster(2, _limited(env), options={"num_worker_threads": 1}, check=False) as c:
        flood = c.start(1, _flood, "worker0", 100)
        _until_full(c, 1, "worker0")
        c.kill(0)
        flood.result()  # the futures have the errors


def test_queue_of_a_worker_has_a_limit_of_its_own(env: dict[str, str]) -> None:
    """A caller that keeps to no limit is refused by the worker."""
    limits = [{**env, "FARPROP_QUEUE_BYTES": str(4 * MIB)}, env, env]
    with cluster(3, limits, options={"num_worker_threads": 1}) as c:
        c.run(1, _flood, "worker0", 20)
        wait_until(lambda: c.run(1, _done) >= 15)
        other = c.start(2, rpc.rpc_sync, "worker0", len, (bytes(2 * MIB),))
        wait_until(lambda: int(c.run(0, f.debug_info)["agent.num_pending_requests"]) >= 4)
        c.run(0, f.open_gate)
        assert other.result() == 2 * MIB  # it is not locked out
        refused = c.run(1, _refusals)
        assert 15 <= len(refused) <= 17
        assert "the limit is 4194304" in refused[0]


def _done() -> int:
    return sum(future.done() for future in _futures)


def _refusals() -> list[str]:
    refusals = []
    for future in _futures:
        try:
            future.wait()
        except OverloadedError as error:
            refusals.append(str(error))
    _futures.clear()
    return refusals
