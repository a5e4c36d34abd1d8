"""A gradient is on the device of its tensor, wherever the forward pass went."""

from __future__ import annotations

import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from tests.devices import functions as fn
from tests.devices.jobs import Maps, job

FORTH: Maps = {"worker1": {"lazy:0": "lazy:1", "lazy:1": "lazy:0"}}


def leaf(device: str) -> torch.Tensor:
    return torch.arange(3.0).to(device).requires_grad_()


def assert_gradient(context_id: int, tensor: torch.Tensor, values: list[float]) -> None:
    gradient = autograd.get_gradients(context_id)[tensor]
    assert gradient.device == tensor.device
    assert gradient.cpu().tolist() == values


def _one_hop() -> None:
    a, b, c = leaf("lazy:0"), leaf("lazy:1"), torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        doubled, other, plain = rpc.rpc_sync("worker1", fn.same, (a * 2, b, c))
        assert [str(t.device) for t in (doubled, other, plain)] == ["lazy:0", "lazy:1", "cpu"]
        loss = doubled.sum().cpu() + (other * 3).sum().cpu() + (plain * 4).sum()
        autograd.backward(context_id, [loss])
        assert_gradient(context_id, a, [2.0, 2.0, 2.0])
        assert_gradient(context_id, b, [3.0, 3.0, 3.0])
        assert_gradient(context_id, c, [4.0, 4.0, 4.0])


def test_one_hop() -> None:
    job(_one_hop, FORTH, {})


def _async_call_with_skip_connection() -> None:
    a = leaf("lazy:0")
    with autograd.context() as context_id:
        out = rpc.rpc_async("worker1", fn.double, (a,)).wait()
        autograd.backward(context_id, [(out * a).sum()])  # a is also used locally
        assert_gradient(context_id, a, [0.0, 4.0, 8.0])


def test_an_async_call_with_a_skip_connection() -> None:
    job(_async_call_with_skip_connection, FORTH, {})


def _nested() -> None:
    a = leaf("lazy:0")
    with autograd.context() as context_id:
        out = rpc.rpc_sync("worker1", fn.pass_on, ("worker2", a))
        assert str(out.device) == "lazy:0"
        autograd.backward(context_id, [out.sum()])
        assert_gradient(context_id, a, [3.0, 3.0, 3.0])


def test_nested_calls() -> None:
    job(_nested, FORTH, {"worker2": {"lazy:1": "lazy:4"}}, {})


def _there_and_back() -> None:
    a = leaf("lazy:0")
    with autograd.context() as context_id:
        out = rpc.rpc_sync("worker1", fn.pass_on, ("worker0", a))
        autograd.backward(context_id, [out.sum()])
        assert_gradient(context_id, a, [3.0, 3.0, 3.0])


def test_maps_in_both_directions() -> None:
    job(_there_and_back, FORTH, {"worker0": {"lazy:1": "lazy:8"}})


def _reference() -> None:
    layer = rpc.remote("worker1", fn.Layer, ("lazy:1",))
    a = leaf("lazy:0")
    with autograd.context() as context_id:
        out = rpc.remote("worker1", fn.run_layer, (layer, a))
        autograd.backward(context_id, [out.to_here().sum()])
        assert_gradient(context_id, a, [2.0, 2.0, 2.0])
        assert rpc.rpc_sync("worker1", fn.gradient_of, (layer, context_id)) == ("lazy:1", [0.0, 1.0, 2.0])
    with autograd.context() as context_id:
        loss = rpc.remote("worker1", fn.run_layer, (layer, a)).remote().sum()
        loss.backward(context_id)
        assert_gradient(context_id, a, [2.0, 2.0, 2.0])


def test_references() -> None:
    job(_reference, FORTH, {})


def _own_worker() -> None:
    a = leaf("lazy:6")
    with autograd.context() as context_id:
        autograd.backward(context_id, [rpc.rpc_sync("worker0", fn.double, (a,)).sum()])
        assert_gradient(context_id, a, [2.0, 2.0, 2.0])


def test_calls_to_the_own_worker() -> None:
    job(_own_worker, {})


def _through_the_cpu() -> None:
    a, b = leaf("lazy:1"), torch.ones(3, requires_grad=True)
    with autograd.context() as context_id:
        out = rpc.rpc_sync("worker1", fn.double, (a,)) + rpc.rpc_sync("worker2", fn.double, (b,)).to("lazy:1")
        autograd.backward(context_id, [out.sum()])
        assert_gradient(context_id, a, [2.0, 2.0, 2.0])
        assert_gradient(context_id, b, [2.0, 2.0, 2.0])


def test_maps_to_and_from_the_cpu() -> None:
    job(_through_the_cpu, {"worker1": {"lazy:1": "cpu"}, "worker2": {"cpu": "lazy:2"}}, {}, {})


def _parameters() -> None:
    parameter = torch.nn.Parameter(torch.ones(3).to("lazy:0"))
    empty = torch.ones(0).to("lazy:0").requires_grad_()
    on_cpu = torch.ones(0, requires_grad=True)
    with autograd.context() as context_id:
        out, nothing, also_nothing = rpc.rpc_sync("worker1", fn.same, (parameter, empty, on_cpu))
        autograd.backward(context_id, [(out.sum() + nothing.sum()).cpu() + also_nothing.sum()])
        assert_gradient(context_id, parameter, [1.0, 1.0, 1.0])
        assert_gradient(context_id, empty, [])
        assert_gradient(context_id, on_cpu, [])


def test_parameters_and_empty_tensors() -> None:
    job(_parameters, FORTH, {})


def _no_grad() -> None:
    a = leaf("lazy:0")
    with autograd.context(), torch.no_grad():
        assert rpc.rpc_sync("worker1", fn.about, (a,)) == ("lazy:1", True, True)


def test_maps_apply_with_grad_off() -> None:
    job(_no_grad, FORTH, {})
