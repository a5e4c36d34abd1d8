"""Passes that fail: all workers learn of the failure, and nothing of the pass is left."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import BackwardError, ConnectionLostError, FarpropError, RpcTimeoutError
from tests.autograd import functions as g
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster


def _raising() -> None:
    a = torch.ones(2, 2, requires_grad=True)
    rpc.rpc_sync("worker2", g.set_error, args=("no gradient today",))
    with autograd.context() as context_id:
        x = rpc.rpc_sync("worker1", g.times_parameter, args=(a,))
        loss = rpc.rpc_sync("worker2", g.raising_later, args=(x,)).sum()
        with pytest.raises(BackwardError, match="Error on Node 2: no gradient today") as raised:
            autograd.backward(context_id, [loss], retain_graph=True)
        assert any("in backward" in note for note in raised.value.__notes__)  # the remote traceback
        # Not even the gradient that was computed before the error is left.
        assert rpc.rpc_sync("worker2", g.gradient_of_parameter, args=(context_id,)) is None
        for worker in ("worker0", "worker1", "worker2"):
            assert rpc.rpc_sync(worker, g.info)["num_current_backward_passes"] == 0
        rpc.rpc_sync("worker2", g.set_error, args=(None,))
        autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[a], torch.full((2, 2), 9.0))
        assert torch.equal(
            rpc.rpc_sync("worker2", g.gradient_of_parameter, args=(context_id,)), torch.full((2, 2), 3.0)
        )


def test_an_error_on_another_worker_fails_the_pass(workers: Cluster) -> None:
    workers.run(0, _raising)


def _local_error() -> None:
    a = torch.ones(2, requires_grad=True)
    g.set_error("mine")
    with autograd.context() as context_id:
        x = rpc.rpc_sync("worker1", torch.neg, args=(a,))
        with pytest.raises(ValueError, match="^mine$"):
            autograd.backward(context_id, [g.Raising.apply(x).sum()])


def test_an_error_in_the_local_graph_is_raised_unchanged(workers: Cluster) -> None:
    workers.run(0, _local_error)


def _released_during_its_pass() -> None:
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        x = rpc.rpc_sync("worker1", torch.neg, args=(a,))
        x.register_hook(lambda gradient: autograd._release_context(context_id))
        y = rpc.rpc_sync("worker1", torch.neg, args=(x,))
        with pytest.raises(RuntimeError, match=r"Could not find autograd context with id: \d+. It has ended"):
            autograd.backward(context_id, [y.sum()])


def test_releasing_a_context_during_its_pass_fails_the_pass(workers: Cluster) -> None:
    workers.run(0, _released_during_its_pass)


def _backward_through_gate(gate: str, hops: int, timeout: float | None = None) -> tuple[str, str | None, float]:
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        if hops == 1:
            x = rpc.rpc_sync("worker2", g.at_gate, args=(a, gate))
        else:
            x = rpc.rpc_sync("worker1", g.at_gate_of, args=("worker2", a, gate))
        began = time.monotonic()
        try:
            autograd.backward(context_id, [x.sum()], timeout=timeout)
        except FarpropError as error:
            return type(error).__name__, error.worker, time.monotonic() - began
    raise AssertionError("it should have failed")


@pytest.mark.parametrize("hops", [1, 2])
def test_a_worker_that_dies_during_a_pass_fails_it(hops: int) -> None:
    with cluster(3) as job:
        kind, worker, seconds = job.run(0, _backward_through_gate, "death", hops)
        assert (kind, worker) == (ConnectionLostError.__name__, "worker2")
        assert seconds < 5
        job.wait(2)
        for rank in (0, 1):
            job.run(rank, g.no_contexts_left)


def test_a_pass_that_waits_for_a_stuck_worker_times_out(workers: Cluster) -> None:
    kind, _, seconds = workers.run(0, _backward_through_gate, "stillness", 2, 0.3)
    assert kind == RpcTimeoutError.__name__
    assert seconds >= 0.3
    workers.run(2, g.open_gate, "stillness")


def _keep_a_context() -> int:
    context = autograd._new_context()
    rpc.rpc_sync("worker1", rpc.rpc_sync, args=("worker2", g.times_parameter, (torch.ones(2, 2),)))
    return context._context_id()


@pytest.mark.parametrize("dead", [0, 1])
def test_contexts_end_when_a_worker_that_knows_them_dies(dead: int) -> None:
    """If the creator of a context dies, all workers end it. If a worker in between dies, the creator cleans up."""
    with cluster(3) as job:
        context_id = job.run(0, _keep_a_context)
        assert job.run(2, g.context_exists, context_id)
        job.kill(dead)
        if dead == 1:
            job.run(0, autograd._release_context, context_id)
        for rank in {0, 1, 2} - {dead}:
            job.run(rank, g.no_contexts_left)


def _is_stuck_at(gate: str) -> bool:
    return g.was_reached(gate)


def test_contexts_end_when_the_origin_dies_during_its_pass() -> None:
    with cluster(3) as job:
        stuck: Any = job.start(0, _backward_through_gate, "orphan", 2)
        wait_until(lambda: job.run(2, _is_stuck_at, "orphan"))
        job.kill(0)
        with pytest.raises(Exception):  # noqa: B017
            stuck.result()
        job.run(2, g.open_gate, "orphan")
        for rank in (1, 2):
            job.run(rank, g.no_contexts_left)


def _backward_through(pid: int) -> str | None:
    """Kill worker1 between the forward and the backward pass; return the worker that the error names."""
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        x = rpc.rpc_sync("worker1", torch.neg, args=(a,))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ConnectionLostError) as raised:
            autograd.backward(context_id, [x.sum()])
    return raised.value.worker


def test_a_pass_through_a_worker_that_died_before_it_names_the_worker() -> None:
    with cluster(2) as job:
        assert job.run(0, _backward_through, job.run(1, os.getpid)) == "worker1"
        job.wait(1)
        job.run(0, g.no_contexts_left)
