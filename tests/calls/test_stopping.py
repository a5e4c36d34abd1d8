"""``shutdown``: graceful, immediate, not called at all, and with workers that die."""

from __future__ import annotations

import gc
import os
import threading
import time

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError
from farprop.runtime.agent_registry import current_agent
from farprop.transport.fault_injection import FaultAction, FaultDecision
from tests.calls import functions as f
from tests.support.workers import cluster, run_workers


def _start(rank: int, world_size: int = 2) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size)


def _pass_on(hops: int, here: int) -> None:
    """Send the next request and return without waiting: work that graceful shutdown must wait for."""
    f.ran.append(hops)
    if hops:
        there = (here + 1) % 3
        rpc.rpc_async(f"worker{there}", _pass_on, args=(hops - 1, there))


def _leave_work_behind(rank: int) -> list[int]:
    _start(rank, 3)
    if rank == 0:
        _pass_on(60, 0)
    rpc.shutdown()
    return list(f.ran)


def test_graceful_shutdown_waits_for_calls_that_make_more_calls() -> None:
    results = run_workers(_leave_work_behind, 3)
    assert sorted(hop for result in results for hop in result) == list(range(61))


def _slow_work(rank: int) -> list[str]:
    _start(rank)
    if rank == 0:
        rpc.rpc_async("worker1", f.wait_for_gate_and_note, args=("done",))
        rpc.rpc_async("worker1", _open_the_gate_a_little_later)
    rpc.shutdown()
    return list(f.ran)


def _open_the_gate_a_little_later() -> None:
    threading.Timer(0.3, f.open_gate).start()


def test_graceful_shutdown_waits_for_slow_functions() -> None:
    assert run_workers(_slow_work, 2, check=False) == [[], ["done"]]


def _init_and_stop(rank: int) -> None:
    for _ in range(10):
        _start(rank)
        rpc.shutdown()


def test_init_and_shutdown_without_a_call() -> None:
    run_workers(_init_and_stop, 2)


def _stop_at_once(rank: int) -> str:
    _start(rank)
    if rank == 1:
        f.gate.wait(20)
        rpc.shutdown(graceful=False)
        return "gone"
    future = rpc.rpc_async("worker1", _note_running)
    rpc.rpc_sync("worker1", f.open_gate)
    with pytest.raises(ConnectionLostError, match="worker1"):
        future.wait()
    pending = rpc.rpc_async("worker0", f.wait_for_gate)
    began = time.monotonic()
    rpc.shutdown(graceful=False)
    assert time.monotonic() - began < 10
    with pytest.raises(RuntimeError):
        pending.wait()
    f.gate.set()
    return "told"


def _note_running() -> None:
    time.sleep(3)


def test_ungraceful_shutdown_is_immediate_and_pending_calls_fail() -> None:
    assert run_workers(_stop_at_once, 2, check=False) == ["told", "gone"]


def _shut_down_with_timeout(rank: int) -> str:
    _start(rank)
    if rank == 1:
        time.sleep(1.0)
        rpc.shutdown(graceful=False)
        return "late"
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        rpc.shutdown(timeout=0.2)
    assert time.monotonic() - began < 10
    assert not rpc._is_current_rpc_agent_set()
    return "did not wait"


def test_a_graceful_shutdown_that_times_out_still_stops_the_worker() -> None:
    assert run_workers(_shut_down_with_timeout, 2) == ["did not wait", "late"]


def test_shutdown_does_not_wait_for_a_dead_worker() -> None:
    with cluster(3) as c:
        handles = [c.start(rank, _shutdown_error) for rank in (0, 2)]
        c.kill(1)
        texts = [handle.result(30) for handle in handles]
    assert any("worker1" in text for text in texts)


def _shutdown_error() -> str:
    try:
        rpc.shutdown()
    except RuntimeError as error:
        return str(error)
    return "no error"


# Exits. These tests include a real exit of the interpreter.


def _exit_with_open_calls(rank: int) -> None:
    _start(rank)
    if rank == 0:
        for _ in range(50):
            rpc.rpc_async("worker1", f.identity, args=(torch.ones(1000),))
        rpc.rpc_async("worker1", f.wait_for_gate)
    # no shutdown


def test_exiting_without_shutdown_neither_hangs_nor_crashes() -> None:
    run_workers(_exit_with_open_calls, 2, check=False, full_exit=True, timeout=60)


def _exit_with_unawaited_failures(rank: int) -> None:
    _start(rank)
    futures = [rpc.rpc_async(f"worker{1 - rank}", f.raise_value_error, args=("x",)) for _ in range(20)]
    rpc.shutdown()
    del futures
    gc.collect()


def test_exiting_with_unawaited_futures() -> None:
    run_workers(_exit_with_unawaited_failures, 2, full_exit=True)


def _interrupted(rank: int) -> str:
    _start(rank)
    if rank == 1:
        rpc.shutdown()
        return "served"
    with pytest.raises(KeyboardInterrupt):
        rpc.rpc_sync("worker1", f.interrupt_and_wait_for_gate, args=(os.getpid(),))
    rpc.rpc_sync("worker1", f.open_gate)
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2
    rpc.shutdown()
    return "went on"


def test_a_worker_goes_on_after_ctrl_c_during_a_call() -> None:
    assert run_workers(_interrupted, 2, check=False) == ["went on", "served"]


def _forked(rank: int) -> int:
    _start(rank)
    code = 0
    if rank == 0:
        pid = os.fork()
        if pid == 0:
            try:
                rpc.rpc_sync("worker1", f.noop)
            except RuntimeError as error:
                os._exit(7 if "has not been initialized" in str(error) else 8)
            os._exit(9)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2
    rpc.shutdown()
    return code


def test_a_forked_child_is_not_a_worker_but_its_parent_still_is() -> None:
    assert run_workers(_forked, 2) == [7, 0]


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def _idle() -> float:
    rpc.rpc_sync("worker1", f.noop)
    # The test measures that nothing happens, so it can only sleep.
    time.sleep(0.3)
    before = _cpu_seconds()
    time.sleep(1.0)
    return _cpu_seconds() - before


def test_idle_workers_use_no_cpu(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        other = c.start(1, _idle_here)
        assert c.run(0, _idle) < 0.05
        assert other.result() < 0.05


def _idle_here() -> float:
    time.sleep(0.5)
    before = _cpu_seconds()
    time.sleep(0.7)
    return _cpu_seconds() - before


def _shut_down_over_a_slow_network(rank: int) -> None:
    _start(rank)
    assert rpc.rpc_sync(f"worker{1 - rank}", abs, args=(-1,)) == 1
    current_agent().peers.set_fault_policy(lambda peer, message: FaultDecision(FaultAction.DELAY, 0.15))
    rpc.shutdown(timeout=15)


def test_shutdown_ends_if_messages_take_longer_than_a_round_waits() -> None:
    """The leader's messages of one round were still unanswered in the next, which took it for busy, for ever."""
    run_workers(_shut_down_over_a_slow_network, 2, check=False, timeout=40)
