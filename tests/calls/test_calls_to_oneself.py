"""Calls of a worker to itself: they touch no socket, and behave as all others do."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.support.workers import cluster


def _sockets() -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the directory itself
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


def _calls_of_every_kind() -> None:
    before = _sockets()
    own = rpc.get_worker_info().name
    small, large = torch.rand(3), torch.rand(100_000)
    for x in (small, large):
        got = rpc.rpc_sync(own, f.identity, args=(x,))
        assert torch.equal(got, x)
        assert got.data_ptr() != x.data_ptr()
        rpc.rpc_sync(own, f.fill, args=(x, 7.0))  # changes a copy
        assert not torch.equal(x, torch.full_like(x, 7.0))
    later = rpc.rpc_async(own, f.later, args=(5,))
    f.open_gate()
    assert later.wait() == 5
    made = rpc.remote(own, torch.arange, args=(3,))
    assert made.rpc_sync().sum() == 3
    assert made.rpc_async().numel().wait() == 3
    assert made.to_here() is made.local_value()
    assert rpc.rpc_sync(own, f.own_name) == own
    with pytest.raises(ValueError, match="no"):
        rpc.rpc_sync(own, f.raise_value_error, args=("no",))
    assert _sockets() == before


def test_calls_of_every_kind_use_no_socket(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _calls_of_every_kind)


def _runs_elsewhere() -> bool:
    """With the state of a fresh thread, whatever that of the caller is."""
    with torch.no_grad():
        ident, grad = rpc.rpc_sync(rpc.get_worker_info().name, _thread_and_grad_mode)
    return ident != threading.get_ident() and grad


def _thread_and_grad_mode() -> tuple[int, bool]:
    return threading.get_ident(), torch.is_grad_enabled()


def test_function_does_not_run_on_the_calling_thread(env: dict[str, str]) -> None:
    with cluster(1, env) as c:
        assert c.run(0, _runs_elsewhere)


def _deadlines() -> list[str]:
    own = rpc.get_worker_info().name
    said = []
    for call in (
        lambda: rpc.rpc_sync(own, f.wait_for_gate, timeout=0.2),
        lambda: rpc.rpc_async(own, f.wait_for_gate, timeout=0.2).wait(),
    ):
        try:
            call()
        except RpcTimeoutError as error:
            said.append(str(error))
    f.open_gate()
    assert rpc.rpc_sync(own, f.add, args=(1, 2)) == 3
    return said


def test_deadlines_end_calls_whose_function_does_not(env: dict[str, str]) -> None:
    with cluster(1, env) as c:
        said = c.run(0, _deadlines)
        assert len(said) == 2
        assert all("without an answer from worker0" in text for text in said)


def _nested_with_others() -> int:
    return int(rpc.rpc_async("worker1", f.chain, args=(20, "worker1", "worker1", "sync")).wait())


def test_nested_calls_need_one_thread(env: dict[str, str]) -> None:
    with cluster(2, env, options={"num_worker_threads": 1}) as c:
        assert c.run(0, f.chain, 50, "worker0", "worker0", "sync") == 50
        assert c.run(0, f.chain, 50, "worker0", "worker0", "async") == 50
        assert c.run(0, _nested_with_others) == 20


def _gradients() -> list[Any]:
    own = rpc.get_worker_info().name
    a, b = torch.rand(3, requires_grad=True), torch.rand(3, requires_grad=True)
    with dist_autograd.context() as context:
        x = rpc.rpc_sync(own, torch.mul, args=(a, b))
        y = rpc.rpc_async(own, torch.mul, args=(x, b)).wait()
        dist_autograd.backward(context, [y.sum()])
        gradients = dist_autograd.get_gradients(context)
    torch.testing.assert_close(gradients[a], (b * b).detach())
    torch.testing.assert_close(gradients[b], (2 * a * b).detach())
    return [len(gradients)]


def test_gradients_pass_through_calls_to_oneself(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        assert c.run(0, _gradients) == [2]


def _many_at_once() -> int:
    own = rpc.get_worker_info().name
    futures = [rpc.rpc_async(own, f.add, args=(number, 1)) for number in range(2000)]
    total = sum(future.wait() for future in futures)
    for _ in range(10):
        rpc.rpc_async(own, f.sleep, args=(0.01,)).wait()
    connection = current_agent().peers.connections[own]
    connection.validate()
    assert not connection.open_calls
    assert not connection._followers, "callers that are gone"
    return total


def test_many_calls_at_once(env: dict[str, str]) -> None:
    with cluster(1, env) as c:
        assert c.run(0, _many_at_once) == sum(range(1, 2001))


def _call_after_shutdown() -> None:
    agent = current_agent()
    own = rpc.get_worker_info().name
    future = rpc.rpc_async(own, f.wait_for_gate)
    agent.peers.lose(rpc.get_worker_info().id, "a test says so")
    with pytest.raises(ConnectionError):
        future.wait()
    f.open_gate()
    assert rpc.rpc_sync(own, f.add, args=(1, 2)) == 3  # over a new connection


def test_lost_connection_fails_open_calls(env: dict[str, str]) -> None:
    with cluster(1, env) as c:
        c.run(0, _call_after_shutdown)


_order: list[int] = []


def _note_order(value: int) -> None:
    _order.append(value)


def _many_in_a_row() -> None:
    sys.setswitchinterval(1e-6)  # threads meet anywhere
    own = rpc.get_worker_info().name
    for _ in range(300):
        _order.clear()
        for future in [rpc.rpc_async(own, _note_order, args=(i,)) for i in range(20)]:
            future.wait()
        assert _order == list(range(20))


def test_one_thread_runs_them_in_the_order_in_which_they_were_made(env: dict[str, str]) -> None:
    with cluster(1, env, options={"num_worker_threads": 1}) as c:
        c.run(0, _many_in_a_row)
