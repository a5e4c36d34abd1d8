"""Operations with a deadline end soon after it, also if a worker is stopped. The bounds are generous: what was wrong
took seconds longer.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from farprop.rpc import api
from tests.autograd import functions as g
from tests.references.looking import wait_until
from tests.support.workers import cluster


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as text:
        return text.read().rpartition(")")[2].split()[0]


@contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: _state(pid) == "T")
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _backward_through_a_stopped_worker(pid: int) -> float:
    a = torch.ones(2, 2, requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", g.times_parameter, args=(a,)).sum()
        with _stopped(pid):
            began = time.monotonic()
            with pytest.raises(RpcTimeoutError):
                autograd.backward(context_id, [loss], retain_graph=True, timeout=0.5)
            seconds = time.monotonic() - began
            with pytest.raises(RpcTimeoutError, match=r"An earlier backward pass .* worker1 did not undo it in time"):
                autograd.backward(context_id, [loss], retain_graph=True, timeout=0.2)
        # The next pass waits until the failed one is undone everywhere.
        autograd.backward(context_id, [loss])
        assert torch.equal(autograd.get_gradients(context_id)[a], torch.full((2, 2), 3.0))
        there = rpc.rpc_sync("worker1", g.gradient_of_parameter, args=(context_id,))
        assert torch.equal(there, torch.ones(2, 2))
    return seconds


def test_a_pass_through_a_stopped_worker_ends_soon_after_its_deadline() -> None:
    with cluster(2) as job:
        assert job.run(0, _backward_through_a_stopped_worker, job.pid(1)) < 4  # it took 5.5 s


def _stop_after_the_first_stage() -> None:
    """All workers have called ``shutdown``, and then this one is stopped."""
    api._drain_work = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    try:
        rpc.shutdown(timeout=30)
    except RuntimeError:
        pass  # it comes back when the others are gone


def _shut_down() -> float:
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        rpc.shutdown(timeout=2.0)
    return time.monotonic() - began


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shutdown_beside_a_stopped_worker_ends_soon_after_its_deadline(rank: int) -> None:
    with cluster(2, check=False) as job:
        stopped = job.start(1 - rank, _stop_after_the_first_stage)
        assert job.run(rank, _shut_down) < 3.5  # each of two stages took two seconds
        job.signal(1 - rank, signal.SIGCONT)
        stopped.result()
