"""Autograd contexts in compiled code."""

# TorchScript reads these annotations.
# ruff: noqa: UP006, UP035

from __future__ import annotations

import threading
from typing import Dict, List

import torch
from torch import Tensor

import farprop.autograd as autograd
import farprop.rpc as rpc
from tests.jit import functions as f
from tests.support.workers import Cluster


@torch.jit.script
def _add(to: str, x: Tensor) -> Tensor:
    return rpc.rpc_sync(to, f.add, (x, x))


@torch.jit.script
def _add_in_two(to: str, x: Tensor) -> Tensor:
    future = rpc.rpc_async(to, f.add, (x, x))
    return future.wait()


@torch.jit.script
def _fork_and_go_on(to: str, x: Tensor, count: int) -> Tensor:
    forked: List[torch.jit.Future[Tensor]] = []
    for _ in range(count):
        forked.append(torch.jit._fork(_add, to, x))
    found = torch.zeros_like(x)
    for future in forked:
        found = found + torch.jit._wait(future)
    return found + _add_in_two(to, x)  # may run on another thread


@torch.jit.script
def _fork_twice(to: str, x: Tensor) -> Tensor:
    return torch.jit._wait(torch.jit._fork(_fork_and_go_on, to, x, 2))


def _contexts() -> None:
    x = torch.ones(2, requires_grad=True)
    for function, times in ((_add, 2), (_add_in_two, 2), (_fork_twice, 6)):
        with autograd.context() as context_id:
            autograd.backward(context_id, [function("worker1", x).sum()])
            assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), float(times)))
    with autograd.context() as context_id:
        autograd.backward(context_id, [_fork_and_go_on("worker1", x, 10).sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 22.0))


def test_forks_and_waits_keep_the_context(workers: Cluster) -> None:
    workers.run(0, _contexts)


def _called() -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        found = rpc.rpc_sync("worker1", _fork_and_go_on, args=("worker2", x, 3))
        autograd.backward(context_id, [found.sum()])
        assert torch.equal(autograd.get_gradients(context_id)[x], torch.full((2,), 8.0))


def test_a_called_script_function_keeps_the_context(workers: Cluster) -> None:
    workers.run(0, _called)


def _fork_after_leaving_a_context() -> None:
    """A thread that forked in a context and has left it."""
    x = torch.ones(2, requires_grad=True)
    inside, done = threading.Event(), threading.Event()
    made: List[autograd.DistAutogradContext] = []

    def other() -> None:
        with autograd.context():
            made.append(autograd._current_context())
            inside.set()
            done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait()
    outer = autograd.current_context.set(made[0])
    _fork_and_go_on("worker1", x, 1)
    autograd.current_context.reset(outer)
    sends = len(made[0]._send_functions())
    assert sends == 2
    assert not _fork_and_go_on("worker1", x.detach(), 2).requires_grad
    _fork_and_go_on("worker1", x, 2)
    assert len(made[0]._send_functions()) == sends
    done.set()
    thread.join()


def test_a_context_that_the_thread_has_left_is_not_propagated(workers: Cluster) -> None:
    workers.run(0, _fork_after_leaving_a_context)


@torch.jit.script
def _train(to: str, context_id: int, x: Tensor) -> Dict[Tensor, Tensor]:
    loss = rpc.rpc_sync(to, f.add, (x, x)).sum()
    autograd.backward(context_id, [loss], retain_graph=True)
    autograd.backward(context_id, roots=[loss], mode="smart")
    return autograd.get_gradients(context_id)


def _backward() -> None:
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        ((leaf, gradient),) = _train("worker1", context_id, x).items()
        assert leaf is x
        assert torch.equal(gradient, torch.full((2,), 4.0))


def test_backward_in_compiled_code(workers: Cluster) -> None:
    workers.run(0, _backward)
