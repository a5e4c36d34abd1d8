"""Errors on a worker are raised by the caller, after the other workers are done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import BackwardError, ConnectionLostError, UsageError
from farprop.optim import DistributedOptimizer
from tests.optim.models import Far, Near, assert_same, in_threads, inputs, train_far, train_near
from tests.support.workers import Cluster, cluster

told: list[str] = []


def notify(name: str) -> None:
    told.append(name)


def notify_late() -> None:
    """Tell worker0 late, after many calls: a caller that does not wait for this worker would miss it."""
    me = rpc.get_worker_info().name
    for _ in range(100):
        rpc.rpc_sync(me, torch.neg, (torch.ones(1),))
    rpc.rpc_sync("worker0", notify, (me,))


def failing_on(worker: str) -> bool:
    return rpc.get_worker_info().name in worker.split()


class RaisesOnSomeWorkers(optim.SGD):
    """Raises on some workers when it is created or steps; on others it notifies worker0 when it is done."""

    def __init__(self, params: Any, lr: float, making: str = "", stepping: str = "") -> None:
        super().__init__(params, lr=lr)
        if failing_on(making):
            raise KeyError("no optimizer today")
        self.stepping = stepping
        if making:
            notify_late()

    def step(self, closure: Any = None) -> None:
        if failing_on(self.stepping):
            self.param_groups[0]["params"][0].grad.zero_()
            raise ValueError("no step today")
        super().step(closure)
        notify_late()


def grads(part: Any) -> list[Any]:
    return [parameter.grad for parameter in part.local_value().parameters()]


def _failing_step() -> None:
    told.clear()
    far, near = Far(), Near()
    optimizer = DistributedOptimizer(RaisesOnSomeWorkers, far.references, lr=0.5, stepping="worker1")
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [far.loss(inputs(1)[0])])
        with pytest.raises(ValueError, match="no step today") as raised:
            optimizer.step(context_id)
        assert sorted(told) == ["worker0", "worker2"]
    assert raised.value.__notes__[0].startswith("Raised on worker1")
    assert len(raised.value.__notes__) == 1
    assert rpc.rpc_sync("worker1", grads, (far.parts[0],)) == [None, None]
    before = near.values()
    train_near(near, optim.SGD(near.parameters, lr=0.5), inputs(1))
    after = near.values()
    # worker1 has the first and the fourth parameter.
    assert_same(far.values(), [before[0], after[1], after[2], before[3], after[4], after[5]])
    # The optimizer can be used again, and so can others.
    train_far(far, DistributedOptimizer(optim.SGD, far.references, lr=0.5), inputs(1))
    with pytest.raises(ValueError, match="no step today"):
        train_far(far, optimizer, inputs(1))


def test_an_error_in_a_step(workers: Cluster) -> None:
    workers.run(0, _failing_step)


def _several() -> None:
    far = Far()
    optimizer = DistributedOptimizer(RaisesOnSomeWorkers, far.references, lr=0.5, stepping="worker1 worker2")
    with pytest.raises(ValueError, match="no step today") as raised:
        train_far(far, optimizer, inputs(1))
    assert raised.value.__notes__[0].startswith("Raised on worker1")
    assert raised.value.__notes__[1:] == ["There was an error on worker2 too: ValueError: no step today"]


def test_errors_on_several_workers(workers: Cluster) -> None:
    workers.run(0, _several)


def _failing_construction() -> None:
    told.clear()
    far = Far()
    with pytest.raises(KeyError, match="no optimizer today"):
        DistributedOptimizer(RaisesOnSomeWorkers, far.references, lr=0.5, making="worker2")
    assert sorted(told) == ["worker0", "worker1"]
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        DistributedOptimizer(optim.SGD, far.references, learning_rate=0.5)
    with pytest.raises(ValueError, match="Invalid learning rate"):
        DistributedOptimizer(optim.SGD, far.references, lr=-1)
    with pytest.raises(TypeError, match="optimize.* Tensors"):
        DistributedOptimizer(optim.SGD, [far.parts[0]], lr=0.5)
    failed = rpc.remote("worker1", torch.zeros, (-1,))
    with pytest.raises(RuntimeError, match="must be non-negative"):
        DistributedOptimizer(optim.SGD, [*far.references, failed], lr=0.5)
    # An optimizer that needs a closure can't be stepped.
    with pytest.raises(TypeError, match="closure"):
        train_far(far, DistributedOptimizer(optim.LBFGS, far.references), inputs(1))


def test_an_error_in_the_construction(workers: Cluster) -> None:
    workers.run(0, _failing_construction)


def _wrong_use() -> None:
    far = Far()
    with pytest.raises(TypeError, match=r"params_rref\[1\] should be an RRef to a parameter, but is a Parameter"):
        DistributedOptimizer(optim.SGD, [far.references[0], torch.nn.Parameter(torch.ones(1))], lr=0.5)
    optimizer = DistributedOptimizer(optim.SGD, far.references, lr=0.5)
    with dist_autograd.context() as context_id:
        pass
    with pytest.raises(UsageError, match="Could not find autograd context .* It has ended"):
        optimizer.step(context_id)
    with pytest.raises(UsageError, match="Could not find autograd context"):
        optimizer.step(12345)


def test_wrong_arguments_raise(workers: Cluster) -> None:
    workers.run(0, _wrong_use)


class Scaled(torch.nn.Module):
    """Multiplies with a parameter; the backward pass needs its value."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.full((2, 3), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def not_a_leaf() -> torch.Tensor:
    return torch.ones(2, 3, requires_grad=True) * 2


def _non_leaf() -> None:
    leaf = rpc.remote("worker1", torch.nn.Parameter, args=(torch.ones(1),))
    other = rpc.remote("worker1", not_a_leaf)
    with pytest.raises(
        ValueError, match=r"can't optimize a non-leaf Tensor: params_rref\[2\] on worker1, of shape \(2, 3\)"
    ) as e:
        DistributedOptimizer(optim.SGD, [leaf, rpc.RRef(torch.nn.Parameter(torch.ones(1))), other], lr=0.5)
    assert "the result of MulBackward0" in str(e.value)


def test_a_parameter_that_is_no_leaf_is_named(workers: Cluster) -> None:
    workers.run(0, _non_leaf)


def step_of_another(module: rpc.RRef[Scaled], parameters: list[rpc.RRef[Any]]) -> None:
    """On another worker: a whole step."""
    optimizer = DistributedOptimizer(optim.SGD, parameters, lr=0.5)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [module.rpc_sync().forward(torch.ones(2, 3, requires_grad=True)).sum()])
        optimizer.step(context_id)


def _changed_meanwhile() -> None:
    module = rpc.remote("worker1", Scaled, args=(2.0,))
    (parameter,) = rpc.rpc_sync("worker1", _parameters, args=(module,))
    unused = rpc.remote("worker1", torch.nn.Parameter, args=(torch.ones(1),))
    x = torch.ones(2, 3, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = module.rpc_sync().forward(x).sum()
        # In a thread without this context.
        in_threads(1, lambda _: rpc.rpc_sync("worker2", step_of_another, args=(module, [unused, parameter])))
        with pytest.raises(BackwardError, match="modified by an inplace operation") as raised:
            dist_autograd.backward(context_id, [loss])
    notes = "\n".join(raised.value.__notes__)
    assert "It is params_rref[1] (shape (2, 3)) on worker1, which a step of worker2 (context " in notes
    assert 'consistency="versioned"' in notes
    # The same in a graph of the caller's own, and by a step of its own.
    near = Scaled(2.0)
    optimizer = DistributedOptimizer(optim.SGD, [rpc.RRef(near.by)], lr=0.5)
    with dist_autograd.context() as context_id:
        loss = near(x).sum()
        dist_autograd.backward(context_id, [loss], retain_graph=True)
        optimizer.step(context_id)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as own:
            dist_autograd.backward(context_id, [loss])
    assert "params_rref[0] (shape (2, 3)) on worker0, which a step of this same context" in own.value.__notes__[0]
    # Another change is not blamed on a step.
    with dist_autograd.context() as context_id:
        loss = near(x).sum()
        with torch.no_grad():
            near.by.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as other:
            dist_autograd.backward(context_id, [loss])
    assert not hasattr(other.value, "__notes__")


def _parameters(module: rpc.RRef[Scaled]) -> list[rpc.RRef[Any]]:
    return [rpc.RRef(module.local_value().by)]


def test_a_parameter_that_another_trainer_has_changed_is_named(workers: Cluster) -> None:
    workers.run(0, _changed_meanwhile)


def _set_up() -> None:
    far = Far()
    told.clear()
    state["far"], state["optimizer"] = far, DistributedOptimizer(RaisesOnSomeWorkers, far.references, lr=0.5)


def _after_a_death() -> None:
    far, optimizer = state.pop("far"), state.pop("optimizer")
    with dist_autograd.context() as context_id:
        x = far.parts[1].rpc_sync().forward(inputs(1)[0])
        dist_autograd.backward(context_id, [far.parts[2].rpc_sync().forward(x).sum()])
        with pytest.raises(ConnectionLostError, match="worker1"):
            optimizer.step(context_id)
        assert sorted(told) == ["worker0", "worker2"]


state: dict[str, Any] = {}


def test_a_step_with_a_dead_worker_raises() -> None:
    with cluster(3) as job:
        job.run(0, _set_up)
        job.kill(1)
        job.run(0, _after_a_death)
