"""``DistributedOptimizer.step`` gives the same result as the optimizer in one process."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import optim

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.optim import DistributedOptimizer
from tests.optim.models import (
    Far,
    Near,
    Nested,
    Part,
    Signs,
    SparsePart,
    assert_same,
    in_threads,
    inputs,
    train_far,
    train_near,
)
from tests.support.workers import Cluster, cluster


def unnamed() -> type[optim.Optimizer]:
    """A class that workers can't import, so it is sent by value."""

    class Mine(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.5)
            return super().step(closure)

    return Mine


CHOICES: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "foreach": True, "maximize": True}),
    (optim.Adam, {"lr": 0.05, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.05}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.Adadelta, {"rho": 0.95}),
    (optim.Adamax, {}),
    (optim.ASGD, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.5}),
    (optim.Rprop, {}),
    (Signs, {"lr": 0.1, "beta": 0.25}),
    (Nested, {"lr": 0.1}),
    (unnamed(), {"lr": 0.1}),
]


def _equal(make: Any, kwargs: dict[str, Any], kind: type[Part]) -> None:
    far, near = Far(kind=kind), Near(kind)
    start = near.values()
    distributed = DistributedOptimizer(make, far.references, **kwargs)
    local = make(near.parameters, **kwargs)
    assert train_far(far, distributed, inputs(5)) == train_near(near, local, inputs(5))
    assert_same(far.values(), near.values())
    assert not any(torch.equal(one, other) for one, other in zip(start, far.values(), strict=True))


@pytest.mark.parametrize(("make", "kwargs"), CHOICES, ids=lambda value: getattr(value, "__name__", None))
def test_steps_equal_those_of_a_local_optimizer(workers: Cluster, make: Any, kwargs: dict[str, Any]) -> None:
    workers.run(0, _equal, make, kwargs, Part)


@pytest.mark.parametrize("make", [optim.SparseAdam, optim.SGD, optim.Adagrad])
def test_sparse_gradients(workers: Cluster, make: Any) -> None:
    workers.run(0, _equal, make, {"lr": 0.1}, SparsePart)


def _positional() -> None:
    far, near = Far(), Near()
    train_far(far, DistributedOptimizer(optim.Adam, iter(far.references), 0.1, (0.5, 0.9), eps=0.1), inputs(3))
    train_near(near, optim.Adam(near.parameters, 0.1, (0.5, 0.9), eps=0.1), inputs(3))
    assert_same(far.values(), near.values())
    # A function instead of a class.
    train_far(far, DistributedOptimizer(partial(optim.SGD, lr=0.1), far.references), inputs(1))
    train_near(near, optim.SGD(near.parameters, lr=0.1), inputs(1))
    assert_same(far.values(), near.values())


def test_arguments_are_passed_to_the_class(workers: Cluster) -> None:
    workers.run(0, _positional)


kept: list[Any] = []


def fill_grad(part: Any) -> None:
    part = part.local_value()
    (part.w * 3).sum().backward()
    kept.append((part, part.w.grad))


def grad_is_kept(part: Any) -> bool:
    part = part.local_value()
    filled, grad = kept.pop()
    return filled is part and part.w.grad is grad and grad.eq(3).all().item() and part.b.grad is None


def _own_grad() -> None:
    far, near = Far(), Near()
    for part, worker in zip(far.parts, ("worker1", "worker2", "worker0"), strict=True):
        rpc.rpc_sync(worker, fill_grad, (part,))
    train_far(far, DistributedOptimizer(optim.Adam, far.references), inputs(2))
    train_near(near, optim.Adam(near.parameters), inputs(2))
    assert_same(far.values(), near.values())
    for part in far.parts:
        assert rpc.rpc_sync(part.owner(), grad_is_kept, (part,))


def test_grad_is_neither_used_nor_changed(workers: Cluster) -> None:
    workers.run(0, _own_grad)


def _only_its_own_context() -> None:
    far = Far()
    optimizer = DistributedOptimizer(optim.SGD, far.references, lr=1.0)
    x = inputs(1)[0]
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [far.loss(x)])
        optimizer.step(context_id)
    before = far.values()
    rpc.rpc_sync("worker2", fill_grad, (far.parts[1],))
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [far.parts[0].rpc_sync().forward(x).sum()])
        optimizer.step(context_id)
        after = far.values()
        changed = [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
        assert changed == [True, False, False, True, False, False]
        # The gradients stay in the context, so a second step does the same again.
        optimizer.step(context_id)
        assert_same([after[0] * 2 - before[0]], [far.values()[0]])
    assert rpc.rpc_sync("worker2", grad_is_kept, (far.parts[1],))


def test_parameters_without_a_gradient_do_not_change(workers: Cluster) -> None:
    workers.run(0, _only_its_own_context)


def _untouched_worker() -> None:
    near, values = Near(), []
    for in_thread in (True, False):
        far = Far()
        optimizer = DistributedOptimizer(optim.SGD, far.references, lr=0.5)
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [far.parts[0].rpc_sync().forward(inputs(1)[0]).sum()])
            # The other thread has no context, and worker2 does not know this one.
            if in_thread:
                in_threads(1, lambda _, step=optimizer.step, number=context_id: step(number))
            else:
                optimizer.step(context_id)
        values.append(far.values())
    assert_same(values[0], values[1])
    assert not torch.equal(values[0][0], near.values()[0])
    assert_same(values[0][1:3], near.values()[1:3])


def test_step_skips_workers_that_do_not_know_the_context(workers: Cluster) -> None:
    workers.run(0, _untouched_worker)


def step_elsewhere(optimizer: DistributedOptimizer, context_id: int) -> str:
    optimizer.step(context_id)
    return repr(optimizer)


def _passed_on() -> None:
    far, near = Far(), Near()
    optimizer = DistributedOptimizer(optim.SGD, far.references, lr=0.5)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [far.loss(inputs(1)[0])])
        shown = rpc.rpc_sync("worker2", step_elsewhere, (optimizer, context_id))
    assert shown == repr(optimizer) == "DistributedOptimizer(workers=['worker1', 'worker2', 'worker0'])"
    train_near(near, optim.SGD(near.parameters, lr=0.5), inputs(1))
    assert_same(far.values(), near.values())


def test_an_optimizer_can_be_sent(workers: Cluster) -> None:
    workers.run(0, _passed_on)


def _no_parameters() -> None:
    optimizer = DistributedOptimizer(optim.SGD, [], lr=0.5)
    with dist_autograd.context() as context_id:
        optimizer.step(context_id)
    assert optimizer.remote_optimizers == []
    assert optimizer.state_dict() == {"workers": []}


def test_an_optimizer_without_parameters_is_accepted_as_in_torch(workers: Cluster) -> None:
    workers.run(0, _no_parameters)


class _NotesWhereItSteps(torch.optim.SGD):
    """Notes the thread and the grad mode of each step."""

    steps: list[tuple[int, bool]] = []

    def step(self, closure: Any = None) -> None:
        self.steps.append((threading.get_ident(), torch.is_grad_enabled()))
        super().step(closure)


def _where_steps_run() -> tuple[list[tuple[int, bool]], int]:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(_NotesWhereItSteps, [rpc.RRef(parameter)], lr=0.1)
    with dist_autograd.context() as context:
        dist_autograd.backward(context, [(parameter * 2).sum()])
        with torch.no_grad():
            optimizer.step(context)
    torch.testing.assert_close(parameter.detach(), torch.full((2,), 0.8))
    return _NotesWhereItSteps.steps, threading.get_ident()


def test_own_share_runs_on_the_calling_thread_with_gradients_on() -> None:
    with cluster(1) as c:
        steps, own = c.run(0, _where_steps_run)
        assert steps == [(own, True)]
