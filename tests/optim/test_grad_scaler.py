"""``GradScaler`` with distributed optimizers: one decision for all workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.optim import DistributedOptimizer, GradScaler, clip_grad_norm_
from tests.optim.models import Far, Near, Part, assert_same, inputs
from tests.support.workers import Cluster

SCALE = 1024.0


def _like_one_process(max_norm: float | None) -> None:
    far, near = Far(), Near()
    optimizer = DistributedOptimizer(optim.Adam, far.references, lr=0.1)
    local = optim.Adam(near.parameters, lr=0.1)
    ours, theirs = GradScaler("cpu", SCALE, growth_interval=2), torch.amp.GradScaler("cpu", SCALE, growth_interval=2)
    for x in inputs(4):
        local.zero_grad()
        theirs.scale(near.loss(x)).backward()
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [ours.scale(far.loss(x))])
            if max_norm is not None:
                theirs.unscale_(local)
                expected = nn.utils.clip_grad_norm_(near.parameters, max_norm)
                ours.unscale_(optimizer, context_id)
                torch.testing.assert_close(clip_grad_norm_(context_id, far.references, max_norm), expected)
            ours.step(optimizer, context_id)
        ours.update()
        theirs.step(local)
        theirs.update()
        assert ours.get_scale() == theirs.get_scale()
    assert ours.get_scale() > SCALE
    if max_norm is None:
        assert_same(far.values(), near.values())  # the scale is a power of two
    else:
        for value, other in zip(far.values(), near.values(), strict=True):
            torch.testing.assert_close(value, other)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_as_in_one_process(workers: Cluster, max_norm: float | None) -> None:
    workers.run(0, _like_one_process, max_norm)


class Exploding(Part):
    """Its bias has an infinite gradient while ``is_hot``."""

    is_hot = True

    def forward(self, x: Tensor) -> Tensor:
        if Exploding.is_hot:
            self.b.register_hook(_to_infinity)
        return super().forward(x)


def _to_infinity(gradient: Tensor) -> Tensor:
    return gradient * float("inf")


def _set_hot(is_hot: bool) -> None:
    Exploding.is_hot = is_hot


def _one_decision(unscales: bool) -> None:
    far = Far()
    hot = rpc.remote("worker2", Exploding, (7,))
    references = [*far.references, *hot.rpc_sync().references()]
    optimizer = DistributedOptimizer(optim.SGD, references, lr=0.1)
    scaler = GradScaler("cpu", SCALE)
    for is_hot in (True, False):
        rpc.rpc_sync("worker2", _set_hot, (is_hot,))
        if not is_hot:  # its hooks are gone, too
            hot = rpc.remote("worker2", Part, (7,))
        before = far.values()
        with dist_autograd.context() as context_id:
            loss = far.loss(inputs(1)[0]) + hot.rpc_sync().forward(inputs(1)[0]).sum()
            dist_autograd.backward(context_id, [scaler.scale(loss)])
            if unscales:
                scaler.unscale_(optimizer, context_id)
            scaler.step(optimizer, context_id)
        scaler.update()
        stepped = [not torch.equal(*pair) for pair in zip(before, far.values(), strict=True)]
        assert stepped == [not is_hot] * len(before)
        assert scaler.get_scale() == SCALE / 2


@pytest.mark.parametrize("unscales", [False, True])
def test_an_infinite_gradient_on_one_worker_keeps_all_from_stepping(workers: Cluster, unscales: bool) -> None:
    workers.run(0, _one_decision, unscales)


def _wrong_use() -> None:
    far = Far()
    optimizer = DistributedOptimizer(optim.SGD, far.references, lr=0.1)
    scaler = GradScaler("cpu", SCALE)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [scaler.scale(far.loss(inputs(1)[0]))])
        with pytest.raises(UsageError, match=r"scaler.step\(optimizer, context_id\)"):
            scaler.step(optimizer)
        scaler.unscale_(optimizer, context_id)
        with pytest.raises(UsageError, match="already been called"):
            scaler.unscale_(optimizer, context_id)
        scaler.step(optimizer, context_id)
        with pytest.raises(UsageError, match="after step"):
            scaler.step(optimizer, context_id)
        theirs: Any = torch.amp.GradScaler("cpu", SCALE)
        theirs.scale(torch.ones(1))
        with pytest.raises(UsageError, match=r"farprop\.optim\.GradScaler"):
            theirs.step(optimizer, context_id)
        off = GradScaler("cpu", enabled=False)
        before = far.values()
        off.step(optimizer, context_id)  # a plain step
        assert not torch.equal(before[0], far.values()[0])
    # An optimizer of this process is torch's business.
    parameter = nn.Parameter(torch.ones(1))
    local, scaler = optim.SGD([parameter], lr=1.0), GradScaler("cpu", SCALE)
    scaler.scale(parameter.sum()).backward()
    scaler.step(local)
    scaler.update()
    assert parameter.item() == 0


def test_wrong_use_and_optimizers_of_one_process(workers: Cluster) -> None:
    workers.run(0, _wrong_use)


class Half(Part):
    """Its parameters are float16, which can't be scaled."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.w, self.b = (nn.Parameter(parameter.detach().half()) for parameter in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.half()).float()


def _gradient(context_id: int, reference: Any) -> Tensor:
    return dist_autograd.get_gradients(context_id)[reference.local_value()]


def _fails_on_one_worker() -> None:
    far, half = Far(), rpc.remote("worker2", Half, (7,))
    optimizer = DistributedOptimizer(optim.SGD, [*far.references, *half.rpc_sync().references()], lr=0.1)
    scaler = GradScaler("cpu", SCALE)
    with dist_autograd.context() as context_id:
        loss = far.loss(inputs(1)[0]) + half.rpc_sync().forward(inputs(1)[0]).sum()
        dist_autograd.backward(context_id, [scaler.scale(loss)])
        before = [rpc.rpc_sync(one.owner(), _gradient, (context_id, one)) for one in far.references]
        for _ in range(2):
            with pytest.raises(UsageError, match="float16"):
                scaler.unscale_(optimizer, context_id)
            after = [rpc.rpc_sync(one.owner(), _gradient, (context_id, one)) for one in far.references]
            assert_same(after, before)


def test_an_error_on_one_worker_leaves_all_gradients_scaled(workers: Cluster) -> None:
    workers.run(0, _fails_on_one_worker)
