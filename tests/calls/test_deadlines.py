"""Deadlines: per call, per process, none. A call that arrives too late is not started."""

from __future__ import annotations

import signal
import time

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from tests.calls import functions as f
from tests.support.workers import cluster


def _per_call_and_per_process() -> None:
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError, match=r"RPC ran for more than set timeout \(100 ms\).*worker1"):
        rpc.rpc_sync("worker1", f.wait_for_gate, timeout=0.1)
    future = rpc.rpc_async("worker1", f.wait_for_gate, timeout=0.1)
    with pytest.raises(RpcTimeoutError):
        future.wait()
    assert time.monotonic() - began < 20
    rpc._set_rpc_timeout(0.05)
    assert rpc.get_rpc_timeout() == 0.05
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", f.wait_for_gate)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_async("worker1", f.wait_for_gate).wait()
    forever = rpc.rpc_async("worker1", f.wait_for_gate, timeout=0)
    rpc._set_rpc_timeout(0)
    also = rpc.rpc_async("worker1", f.wait_for_gate)
    rpc._set_rpc_timeout(60)
    rpc.rpc_sync("worker1", f.open_gate)
    assert forever.wait() == also.wait() == "through"
    with pytest.raises(ValueError, match="0 .no timeout. or more"):
        rpc._set_rpc_timeout(-5)


def test_deadlines_hold(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _per_call_and_per_process)


LATE = 0.05


def _send_late_work() -> None:
    rpc.rpc_async("worker1", f.wait_for_gate)  # takes the only thread
    late = rpc.rpc_async("worker1", f.note, args=("late",), timeout=LATE)
    with pytest.raises(RpcTimeoutError):
        late.wait()


def _wait_until_the_request_is_late() -> None:
    while f.debug_info()["agent.num_pending_requests"] != "1":
        pass
    time.sleep(2 * LATE)  # the callee counts from when it read the request


def _send_work_in_time() -> None:
    rpc.rpc_async("worker1", f.note, args=("in time",), timeout=60)


def test_a_request_past_its_deadline_is_not_started() -> None:
    with cluster(2, options={"num_worker_threads": 1}) as c:
        c.run(0, _send_late_work)
        c.run(1, _wait_until_the_request_is_late)
        c.run(0, _send_work_in_time)
        c.run(1, f.open_gate)
        assert c.run(0, _notes_when_done) == ["in time"]


def _notes_when_done() -> list[str]:
    while "in time" not in (noted := rpc.rpc_sync("worker1", f.noted)):
        pass
    return list(noted)


def _stopped_peer() -> None:
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", f.noop, timeout=0.3)
    futures = []
    for _ in range(3):
        futures.append(rpc.rpc_async("worker1", f.identity, args=(torch.zeros(5_000_000),), timeout=0.3))
    for future in futures:
        with pytest.raises(RpcTimeoutError):
            future.wait()
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", f.identity, args=(bytes(30_000_000),), timeout=0.3)
    assert time.monotonic() - began < 30


def _calls_after_continuing() -> None:
    assert rpc.rpc_sync("worker1", f.add, args=(1,), timeout=30) == 2
    assert rpc.rpc_sync("worker1", f.identity, args=(torch.ones(5_000_000),), timeout=30)[-1] == 1


def test_calls_to_a_stopped_peer_end_at_their_deadlines(env: dict[str, str]) -> None:
    """The worker reads no bytes, so the socket fills up. The call must still end at its deadline."""
    with cluster(2, env) as c:
        c.run(0, rpc.rpc_sync, "worker1", f.noop)
        c.signal(1, signal.SIGSTOP)
        try:
            c.run(0, _stopped_peer)
        finally:
            c.signal(1, signal.SIGCONT)
        c.run(0, _calls_after_continuing)
