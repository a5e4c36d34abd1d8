"""Clipping by the norm over all workers, and steps with the gradients of several contexts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, optim

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.optim import DistributedOptimizer, clip_grad_norm_
from tests.optim.models import Far, Near, Part, SparsePart, assert_same, in_threads, inputs
from tests.support.workers import Cluster

LR = 0.5


def _gradients(context_id: int, references: list[Any]) -> list[Tensor]:
    return [rpc.rpc_sync(reference.owner(), _gradient, (context_id, reference)) for reference in references]


def _gradient(context_id: int, reference: Any) -> Tensor:
    return dist_autograd.get_gradients(context_id)[reference.local_value()]


def _like_one_process(norm_type: float, max_norm: float, kind: type[Part]) -> None:
    far, near = Far(kind=kind), Near(kind)
    (x,) = inputs(1)
    near.loss(x).backward()
    # Torch has no norms of sparse gradients.
    dense = [p.grad.to_dense() for p in near.parameters if p.grad is not None]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in dense]), norm_type)
    factor = min(max_norm / (expected.item() + 1e-6), 1.0)
    optimizer = DistributedOptimizer(optim.SGD, far.references, lr=LR)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [far.loss(x)])
        total = clip_grad_norm_(context_id, far.references, max_norm, norm_type)
        torch.testing.assert_close(total, expected)
        # Calls in the context see clipped gradients: they wait until the workers have clipped them.
        for found, whole in zip(_gradients(context_id, far.references), dense, strict=True):
            torch.testing.assert_close(found.to_dense(), whole * factor)
        optimizer.step(context_id)
    for value, parameter, whole in zip(far.values(), near.parameters, dense, strict=True):
        torch.testing.assert_close(value, parameter.detach() - LR * factor * whole)


@pytest.mark.parametrize(("norm_type", "max_norm"), [(2.0, 0.01), (2.0, 1e6), (1.0, 0.3), (float("inf"), 0.01)])
def test_as_in_one_process(workers: Cluster, norm_type: float, max_norm: float) -> None:
    workers.run(0, _like_one_process, norm_type, max_norm, Part)


def test_sparse_gradients(workers: Cluster) -> None:
    workers.run(0, _like_one_process, 2.0, 0.01, SparsePart)


def _round_trips() -> None:
    far = Far()
    sent: list[str] = []
    theirs = rpc.rpc_async

    def noted(to: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        sent.append(f"{to} {function.__name__}")
        return theirs(to, function, *args, **kwargs)

    with dist_autograd.context() as context_id, pytest.MonkeyPatch.context() as patch:
        dist_autograd.backward(context_id, [far.loss(inputs(1)[0])])
        patch.setattr(rpc, "rpc_async", noted)
        clip_grad_norm_(context_id, far.references, 1e6)
        assert sorted(sent) == ["worker1 norms_here", "worker2 norms_here"]
        sent.clear()
        clip_grad_norm_(context_id, far.references, 1e-3)
        assert sorted(sent[:2]) == ["worker1 norms_here", "worker2 norms_here"]
        assert sorted(sent[2:]) == ["worker1 scale_here", "worker2 scale_here"]
        again = clip_grad_norm_(context_id, far.references, 1e-3)
        assert again.item() == pytest.approx(1e-3, rel=0.01)


def test_workers_are_asked_once_and_told_only_if_need_be(workers: Cluster) -> None:
    workers.run(0, _round_trips)


def _not_finite() -> None:
    far = Far()
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [far.loss(inputs(1)[0]) * float("inf")])
        with pytest.raises(UsageError, match="non-finite"):
            clip_grad_norm_(context_id, far.references, 1.0, error_if_nonfinite=True)
        assert not clip_grad_norm_(context_id, far.references, 1.0).isfinite()
        with pytest.raises(TypeError, match=r"params_rref\[0\] should be an RRef"):
            clip_grad_norm_(context_id, [torch.ones(1)], 1.0)  # type: ignore[list-item]
        with pytest.raises(UsageError, match=r"max_norm is a norm, which is 0 or more, and not -1\.0"):
            clip_grad_norm_(context_id, far.references, -1.0)
    with pytest.raises(UsageError, match="It has ended"):
        clip_grad_norm_(context_id, far.references, 1.0)


def test_norms_that_are_not_finite_and_wrong_arguments(workers: Cluster) -> None:
    workers.run(0, _not_finite)


def _several_contexts() -> None:
    far, near = Far(), Near()
    xs = inputs(3)
    for x in xs:
        near.loss(x).backward()
    expected = torch.nn.utils.clip_grad_norm_(near.parameters, 0.5)
    optim.SGD(near.parameters, lr=LR).step()
    optimizer = DistributedOptimizer(optim.SGD, far.references, lr=LR)
    ids: list[int] = []
    ready, done = threading.Barrier(4), threading.Event()

    def train(number: int) -> None:
        if number < 3:
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [far.loss(xs[number])])
                ids.append(context_id)
                ready.wait(30)
                assert done.wait(30)
            return
        ready.wait(30)
        try:
            torch.testing.assert_close(clip_grad_norm_(ids, far.references, 0.5), expected)
            optimizer.step(*ids)
        finally:
            done.set()

    in_threads(4, train)
    for value, other in zip(far.values(), near.values(), strict=True):
        torch.testing.assert_close(value, other)


def test_a_step_with_the_gradients_of_several_contexts(workers: Cluster) -> None:
    workers.run(0, _several_contexts)


def _several_passes() -> None:
    far, near = Far(), Near()
    xs = inputs(3)
    for x in xs:
        near.loss(x).backward()
    optim.SGD(near.parameters, lr=LR).step()
    optimizer = DistributedOptimizer(optim.SGD, far.references, lr=LR)
    with dist_autograd.context() as context_id:
        for x in xs:
            dist_autograd.backward(context_id, [far.loss(x)])
        optimizer.step(context_id)
    assert_same(far.values(), near.values())


def test_a_step_with_the_gradients_of_several_passes(workers: Cluster) -> None:
    workers.run(0, _several_passes)
