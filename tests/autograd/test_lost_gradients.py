"""A backward pass that ends at a call without a context warns, once for each function; others don't."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import LostGradientWarning
from farprop.nn import RemoteModule
from farprop.runtime.autograd import lost_gradients
from tests.support.workers import Cluster, cluster


def doubled(x: Tensor) -> Tensor:
    return x * 2


def nested(x: Tensor) -> dict[str, list[Tensor]]:
    return {"both": [x * 2, x.detach()]}


def loss_there(x: Tensor) -> list[str]:
    """Run a backward pass on this worker; returns the warnings."""
    lost_gradients._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x.sum().backward()
    return [str(each.message) for each in caught]


def loss_there_too(*, x: Tensor) -> list[str]:
    return loss_there(x)


def weights() -> Tensor:
    return nn.Parameter(torch.ones(2))


def _caught() -> None:
    lost_gradients._warned.clear()
    a = torch.ones(2, requires_grad=True)
    y = rpc.rpc_sync("worker1", doubled, args=(a,))
    assert y.is_leaf
    with pytest.warns(
        LostGradientWarning, match=r"ends at the result of .*:doubled, which worker1 has computed"
    ) as seen:
        y.sum().backward()
    assert len(seen) == 1
    assert "farprop.autograd.context()" in str(seen[0].message)
    assert seen[0].filename == __file__  # where the program called backward, not a file of torch's
    assert y.grad is not None
    assert a.grad is None
    # Once for each function; a warning is an error in these tests.
    rpc.rpc_sync("worker1", doubled, args=(a,)).sum().backward()
    y.sum().backward()
    with pytest.warns(LostGradientWarning, match="nested"):
        rpc.rpc_async("worker1", nested, args=(a,)).wait()["both"][0].sum().backward()
    with pytest.warns(LostGradientWarning, match="to_here, which worker1"):
        rpc.remote("worker1", doubled, args=(a,)).to_here().sum().backward()
    layer = RemoteModule("worker1", nn.Linear, args=(2, 2))
    with pytest.warns(LostGradientWarning, match="RemoteModule"):
        layer(torch.ones(1, 2)).sum().backward()
    reference = rpc.remote("worker1", nn.Linear, args=(2, 2))
    with pytest.warns(LostGradientWarning, match="ends at the result of forward, which worker1"):
        reference.rpc_async().forward(torch.ones(1, 2)).wait().sum().backward()


def test_a_pass_through_a_call_without_a_context_warns(workers: Cluster) -> None:
    workers.run(0, _caught)


def _in_an_argument() -> None:
    a = torch.ones(2, requires_grad=True)
    (text,) = rpc.rpc_sync("worker1", loss_there, args=(a * 2,))
    assert "ends at an argument of" in text
    assert "loss_there, which worker0 has computed" in text
    (text,) = rpc.rpc_sync("worker1", loss_there_too, kwargs={"x": a * 2})
    assert "loss_there_too" in text
    assert rpc.rpc_sync("worker1", loss_there, args=(a,)) == []


def test_a_pass_that_ends_at_an_argument_warns(workers: Cluster) -> None:
    workers.run(0, _in_an_argument)


def _quiet() -> None:
    lost_gradients._warned.clear()
    a = torch.ones(2, requires_grad=True)
    # A parameter that is fetched is a leaf, and meant to be one.
    p = rpc.rpc_sync("worker1", weights)
    p.sum().backward()
    assert p.grad is not None
    # Values, without a graph.
    with torch.no_grad():
        y = rpc.rpc_sync("worker1", doubled, args=(a,))
    y.sum().backward()
    y = rpc.rpc_sync("worker1", doubled, args=(a.detach(),)).requires_grad_()
    y.sum().backward()
    # Nobody asks for more than this.
    y = rpc.rpc_sync("worker1", doubled, args=(a,))
    (gradient,) = torch.autograd.grad(y.sum(), [y])
    assert torch.equal(gradient, torch.ones(2))
    (y * 3).detach().sum()
    with dist_autograd.context() as context_id:
        y = rpc.rpc_sync("worker1", doubled, args=(a,))
        dist_autograd.backward(context_id, [y.sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[a], torch.full((2,), 2.0))
    assert not lost_gradients._warned


def test_no_false_alarms(workers: Cluster) -> None:
    workers.run(0, _quiet)


def _in_a_context_later() -> None:
    lost_gradients._warned.clear()
    a = torch.ones(2, requires_grad=True)
    y = rpc.rpc_sync("worker1", doubled, args=(a,))  # too early
    with dist_autograd.context() as context_id, pytest.warns(LostGradientWarning, match="doubled"):
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.neg, args=(y,)).sum()])


def test_a_distributed_pass_that_ends_there_warns(workers: Cluster) -> None:
    workers.run(0, _in_a_context_later)


def _restricted() -> None:
    rpc.expose(doubled)
    a = torch.ones(2, requires_grad=True)
    y = rpc.rpc_sync(rpc.get_worker_info(), doubled, args=(a,))
    with pytest.warns(LostGradientWarning, match="doubled"):
        y.sum().backward()


def test_it_warns_in_a_restricted_job() -> None:
    with cluster(1, {"FARPROP_RESTRICTED": "1"}) as job:
        job.run(0, _restricted)
