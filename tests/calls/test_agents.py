"""The agent that ``rpc.api._get_current_rpc_agent()`` returns, on several workers."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.rpc import _utils
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.support.workers import cluster, run_workers


def _agent() -> Any:
    return rpc.api._get_current_rpc_agent()


@rpc.functions.async_execution
def _keep_waiting() -> Any:
    return rpc.rpc_async("worker0", _wait_for_the_gate)


_gate: list[torch.futures.Future[int]] = []


@rpc.functions.async_execution
def _wait_for_the_gate() -> Any:
    _gate.append(torch.futures.Future())
    return _gate[0]


def _metrics() -> dict[str, str]:
    found: dict[str, str] = _agent().get_metrics()
    return found


def _count_waiting_calls() -> None:
    before = _metrics()
    assert before["agent.server_active_async_calls"] == "0"
    future = rpc.rpc_async("worker1", _keep_waiting)
    wait_until(lambda: bool(_gate) and _metrics()["agent.server_active_async_calls"] == "1")
    # The function there has made its call, and may not have returned yet.
    wait_until(lambda: rpc.rpc_sync("worker1", _metrics)["agent.server_active_async_calls"] == "1")
    there = rpc.rpc_sync("worker1", _metrics)
    assert int(there["agent.client_active_calls"]) == 1
    assert int(there["agent.server_active_calls"]) == 2  # including the call that asks
    assert _metrics()["agent.client_active_calls"] == "1"
    _gate.pop().set_result(4)
    assert future.wait() == 4
    wait_until(lambda: _metrics()["agent.server_active_async_calls"] == "0")
    assert set(there) == set(before)
    assert set(before) <= set(_agent().get_debug_info())


def test_metrics_count_waiting_calls() -> None:
    with cluster(2) as c:
        c.run(0, _count_waiting_calls)


def _join_waits_for_calls(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    futures = [rpc.rpc_async(f"worker{1 - rank}", f.add, args=(n, 1)) for n in range(20)]
    _agent().join(timeout=30)
    assert all(future.done() for future in futures)
    assert rpc.rpc_sync(f"worker{1 - rank}", f.add, args=(1, 1)) == 2
    _agent().join(shutdown=True)
    rpc.shutdown()
    with pytest.raises(RuntimeError, match="has not been initialized"):
        _agent()


def test_join_waits_for_all_calls_of_all_workers() -> None:
    run_workers(_join_waits_for_calls, 2)


def _options_with_maps(rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=3, rpc_timeout=20)
    if rank == 0:
        options.set_device_map("worker1", {"cpu": "meta"})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    agent = _agent()
    assert agent._get_backend_options() is options
    expected = {torch.device("cpu"): torch.device("meta")} if rank == 0 else {}
    assert agent._get_device_map(rpc.get_worker_info("worker1")) == expected
    assert agent._get_device_map(rpc.get_worker_info("worker0")) == {}
    assert rpc.backend_registry._get_device_infos() == (torch.cuda.device_count(), options.device_maps, [])
    assert isinstance(agent.store, dist.Store)
    rpc.shutdown()
    assert agent.store is None


def test_options_device_maps_and_the_store() -> None:
    run_workers(_options_with_maps, 2)


def _in_a_dynamic_group(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank)
    other = f"worker{1 - rank}"
    wait_until(lambda: other in {info.name for info in _agent().get_worker_infos()})
    assert not _agent().is_static_group
    assert rpc.rpc_sync(other, _utils._update_group_membership, args=(_agent().get_worker_info(), [], {}, True)) is None
    assert rpc.rpc_sync(other, f.add, args=(1, 2)) == 3
    _agent().join(timeout=20)
    _agent().store.set(f"{rank} is done", "")
    _agent().store.wait([f"{1 - rank} is done"])
    rpc.shutdown()


def test_dynamic_groups() -> None:
    run_workers(_in_a_dynamic_group, 2)


def _wait_in_the_store(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank)
    if rank == 1:
        _agent().store.set("worker1 waits", "")
        _agent().store.wait(["worker0 is done"])
    else:
        _agent().store.wait(["worker1 waits"])
        # Each call reads the store of worker 1, whose main thread waits in it now or in a moment.
        for _ in range(20):
            rpc.rpc_sync("worker1", _utils._update_group_membership, args=(_agent().get_worker_info(), [], {}, True))
        _agent().store.set("worker0 is done", "")
    rpc.shutdown()


def test_a_wait_in_the_agents_store_blocks_no_other_thread() -> None:
    run_workers(_wait_in_the_store, 2)


def _spin_seconds() -> float:
    return current_agent()._loop.activity.spin_seconds


@pytest.mark.one_transport
@pytest.mark.parametrize(("text", "seconds"), [("0", 0.0), ("150", 150e-6), ("", 2e-3)])
def test_limit_of_spinning_is_that_of_the_environment(env: dict[str, str], text: str, seconds: float) -> None:
    with cluster(1, {**env, "FARPROP_SPIN_MICROSECONDS": text}) as c:
        # With a single core no thread spins.
        assert c.run(0, _spin_seconds) == (seconds if len(os.sched_getaffinity(0)) > 1 else 0.0)
