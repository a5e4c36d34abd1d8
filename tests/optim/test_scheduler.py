"""Learning-rate schedulers of a ``DistributedOptimizer`` behave like those of a local optimizer."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim import lr_scheduler

from farprop.errors import UsageError
from farprop.optim import DistributedLRScheduler, DistributedOptimizer
from tests.optim.models import Far, Near, Nested, assert_same, copy_values, inputs, train_far, train_near
from tests.support.workers import Cluster


def halve_then_fall(optimizer: optim.Optimizer, falling: float) -> lr_scheduler.LRScheduler:
    """A scheduler composed of others; the worker calls this function."""
    halved = lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=2)
    return lr_scheduler.SequentialLR(optimizer, [halved, lr_scheduler.ExponentialLR(optimizer, falling)], [2])


class Thirds(lr_scheduler.LRScheduler):
    """A user's scheduler."""

    def get_lr(self) -> list[Any]:
        return [group["lr"] / 3 for group in self.optimizer.param_groups]


CHOICES: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (lr_scheduler.StepLR, (2,), {"gamma": 0.5}),
    (lr_scheduler.ExponentialLR, (0.9,), {}),
    (lr_scheduler.CosineAnnealingLR, (10,), {}),
    (lr_scheduler.MultiStepLR, ([1, 3],), {}),
    (lr_scheduler.OneCycleLR, (), {"max_lr": 0.5, "total_steps": 10}),
    (lr_scheduler.LambdaLR, (lambda epoch: 1 / (epoch + 1),), {}),
    (halve_then_fall, (0.5,), {}),
    (Thirds, (), {}),
]


def _equal(make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    far, near = Far(), Near()
    distributed = DistributedOptimizer(optim.SGD, far.references, lr=0.25, momentum=0.5)
    local = optim.SGD(near.parameters, lr=0.25, momentum=0.5)
    schedulers = distributed.lr_scheduler(make, *args, **kwargs), make(local, *args, **kwargs)
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    rates = []
    for number in range(5):
        train_far(far, distributed, inputs(1, number))
        train_near(near, local, inputs(1, number))
        for scheduler in schedulers:
            scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        rates.append(tuple(schedulers[0].get_last_lr()))
    assert len(set(rates)) > 1
    assert_same(far.values(), near.values())


@pytest.mark.parametrize(("make", "args", "kwargs"), CHOICES, ids=[make.__name__ for make, _, _ in CHOICES])
def test_equal_to_a_local_scheduler(workers: Cluster, make: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    workers.run(0, _equal, make, args, kwargs)


def _metrics() -> None:
    far, near = Far(), Near()
    distributed, local = DistributedOptimizer(optim.SGD, far.references, 0.5), optim.SGD(near.parameters, 0.5)
    far_scheduler = distributed.lr_scheduler(lr_scheduler.ReduceLROnPlateau, patience=1)
    near_scheduler = lr_scheduler.ReduceLROnPlateau(local, patience=1)
    for number in range(8):
        train_far(far, distributed, inputs(1, number))
        train_near(near, local, inputs(1, number))
        metric = torch.tensor(float(max(0, 2 - number)), requires_grad=True)
        far_scheduler.step(metric)
        near_scheduler.step(metric)
        assert far_scheduler.get_last_lr() == near_scheduler.get_last_lr()
    assert far_scheduler.get_last_lr()[0] < 0.01
    assert_same(far.values(), near.values())


def test_schedulers_that_take_a_metric(workers: Cluster) -> None:
    workers.run(0, _metrics)


def _several() -> None:
    far, near = Far(), Near()
    distributed, local = DistributedOptimizer(Nested, far.references, 0.5), Nested(near.parameters, 0.5)
    pairs = [
        (distributed.lr_scheduler(make, number), make(local, number))
        for make, number in ((lr_scheduler.ExponentialLR, 0.5), (lr_scheduler.StepLR, 2))
    ]
    for number in range(4):
        train_far(far, distributed, inputs(1, number))
        train_near(near, local, inputs(1, number))
        for pair in pairs:
            for scheduler in pair:
                scheduler.step()
        for one, other in pairs:
            assert one.get_last_lr() == other.get_last_lr()
            assert len(one.get_last_lr()) == 2
    assert_same(far.values(), near.values())


def test_several_schedulers_and_several_groups(workers: Cluster) -> None:
    workers.run(0, _several)


def _resumed() -> None:
    near = Near()
    local = optim.SGD(near.parameters, lr=0.5, momentum=0.5)
    local_scheduler = lr_scheduler.CosineAnnealingLR(local, 8)
    models = [Far(), Far(("worker2", "worker0", "worker1"))]
    saved = io.BytesIO()
    for run, far in enumerate(models):
        optimizer = DistributedOptimizer(optim.SGD, far.references, lr=0.5, momentum=0.5)
        scheduler = optimizer.lr_scheduler(lr_scheduler.CosineAnnealingLR, 8)
        if run:
            saved.seek(0)
            scheduler_state, optimizer_state, values = torch.load(saved, weights_only=True)
            scheduler.load_state_dict(scheduler_state)
            optimizer.load_state_dict(optimizer_state)
            copy_values(values, far.references)
        for number in range(3):
            train_far(far, optimizer, inputs(1, 3 * run + number))
            scheduler.step()
            train_near(near, local, inputs(1, 3 * run + number))
            local_scheduler.step()
            assert scheduler.get_last_lr() == local_scheduler.get_last_lr()
        assert_same(far.values(), near.values())
        torch.save([scheduler.state_dict(), optimizer.state_dict(), far.values()], saved)
    with pytest.raises(UsageError, match="not the state of a distributed scheduler"):
        scheduler.load_state_dict(optimizer.state_dict())


def test_a_new_scheduler_continues_from_a_state(workers: Cluster) -> None:
    workers.run(0, _resumed)


def _wrong() -> None:
    far = Far()
    optimizer = DistributedOptimizer(optim.SGD, far.references, lr=0.5)
    with pytest.raises(TypeError, match="gamma"):
        optimizer.lr_scheduler(lr_scheduler.ExponentialLR)
    scheduler = optimizer.lr_scheduler(lr_scheduler.ReduceLROnPlateau)
    assert isinstance(scheduler, DistributedLRScheduler)
    assert repr(scheduler) == "DistributedLRScheduler(workers=['worker1', 'worker2', 'worker0'])"
    with pytest.raises(TypeError, match="metrics"):
        scheduler.step()
    with pytest.raises(UsageError, match="no parameters"):
        DistributedOptimizer(optim.SGD, []).lr_scheduler(lr_scheduler.StepLR, 1).get_last_lr()


def test_errors_of_schedulers(workers: Cluster) -> None:
    workers.run(0, _wrong)
