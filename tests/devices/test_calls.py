"""Tensors in calls and answers are moved between devices by the caller's device map."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch.autograd.profiler_legacy import profile

import farprop.rpc as rpc
from farprop.errors import UsageError
from tests.devices import functions as fn
from tests.devices.jobs import Maps, job

Point = namedtuple("Point", "x y")

# Worker 0's map for worker 1.
FORTH: Maps = {"worker1": {"lazy:0": "lazy:1", "lazy:1": "lazy:0", "lazy:2": "lazy:5"}}


def on(device: str, *size: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(size or (3,)).numel())).reshape(size or (3,)).to(device)


def assert_on(tensor: torch.Tensor, device: str, values: torch.Tensor) -> None:
    assert str(tensor.device) == device
    assert torch.equal(tensor.cpu(), values)


def _forth_and_back() -> None:
    for here, there in FORTH["worker1"].items():
        assert rpc.rpc_sync("worker1", fn.device, (on(here),)) == there
        assert_on(rpc.rpc_sync("worker1", fn.double, (on(here),)), here, torch.tensor([0.0, 2.0, 4.0]))
        assert_on(rpc.rpc_async("worker1", fn.double, (on(here),)).wait(), here, torch.tensor([0.0, 2.0, 4.0]))
    # Tensors that the callee made are moved by the inverse, too.
    assert_on(rpc.rpc_sync("worker1", fn.made_on, ("lazy:5",)), "lazy:2", torch.arange(3.0))
    assert_on(rpc.rpc_sync("worker1", fn.double_later, (on("lazy:0"),)), "lazy:0", torch.tensor([0.0, 2.0, 4.0]))
    # Tensors on the CPU stay there, also in calls with others.
    back = rpc.rpc_sync("worker1", fn.same, (torch.arange(3), on("lazy:2"), 7))
    assert_on(back[0], "cpu", torch.arange(3))
    assert_on(back[1], "lazy:2", torch.arange(3.0))


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_arguments_use_the_map_and_results_its_inverse(transport: str) -> None:
    job(_forth_and_back, FORTH, {}, transport=transport)


def _shapes() -> None:
    big = on("lazy:0", 300, 100)
    assert_on(rpc.rpc_sync("worker1", fn.double, (big,)), "lazy:0", big.cpu() * 2)
    flipped = on("lazy:0", 40, 30).t()[::2]
    assert_on(rpc.rpc_sync("worker1", fn.same, (flipped,)), "lazy:0", flipped.cpu())
    for value in (on("lazy:0", 0), on("lazy:0")[1], on("lazy:0").to(torch.int64), on("lazy:0").to(torch.bfloat16)):
        assert_on(rpc.rpc_sync("worker1", fn.same, (value,)), "lazy:0", value.cpu())


def test_tensors_of_all_shapes() -> None:
    job(_shapes, FORTH, {})


def _containers() -> None:
    a, b = on("lazy:0"), on("lazy:2")
    args, kwargs = rpc.rpc_sync("worker1", fn.devices, ([a, {"b": b}], (torch.ones(1), a)), {"x": Point(a, [b])})
    assert args == ([("lazy:1"), {"b": "lazy:5"}], ("cpu", "lazy:1"))
    assert kwargs == {"x": Point("lazy:1", ["lazy:5"])}
    twice = rpc.rpc_sync("worker1", fn.same, ([a, a],))
    assert twice[0] is twice[1]
    factor = 3
    assert_on(rpc.rpc_sync("worker1", lambda x: x * factor, (a,)), "lazy:0", torch.tensor([0.0, 3.0, 6.0]))


def test_tensors_in_containers_and_calls_of_lambdas() -> None:
    job(_containers, FORTH, {})


def _grad() -> None:
    leaf = on("lazy:0").requires_grad_()
    assert rpc.rpc_sync("worker1", fn.about, (leaf,)) == ("lazy:1", True, True)
    assert rpc.rpc_sync("worker1", fn.about, (leaf * 2,)) == ("lazy:1", True, True)
    back = rpc.rpc_sync("worker1", fn.double, (leaf,))
    assert (str(back.device), back.requires_grad, back.is_leaf) == ("lazy:0", True, True)


def test_a_tensor_still_requires_grad() -> None:
    job(_grad, FORTH, {})


def _references() -> None:
    rref = rpc.remote("worker1", fn.double, (on("lazy:2"),))
    assert_on(rref.to_here(), "lazy:2", torch.tensor([0.0, 2.0, 4.0]))
    assert rref.rpc_sync().sum().device == torch.device("lazy:2")
    assert rref.remote().sum().to_here().device == torch.device("lazy:2")
    reference = rpc.RRef(on("lazy:3"))  # not mapped, and stays here
    assert_on(reference.to_here(), "lazy:3", torch.arange(3.0))


def test_remote_references() -> None:
    job(_references, FORTH, {})


def _profiled() -> None:
    with profile() as seen:
        assert_on(rpc.rpc_sync("worker1", fn.double, (on("lazy:0"),)), "lazy:0", torch.tensor([0.0, 2.0, 4.0]))
        assert_on(rpc.remote("worker1", fn.double, (on("lazy:1"),)).to_here(), "lazy:1", torch.tensor([0.0, 2.0, 4.0]))
    assert any("rpc_sync#" in event.name for event in seen.function_events)


def test_calls_under_a_profile() -> None:
    job(_profiled, FORTH, {})


def _own_worker() -> None:
    for device in ("lazy:0", "lazy:9"):
        assert rpc.rpc_sync("worker0", fn.device, (on(device),)) == device
        assert_on(rpc.rpc_sync("worker0", fn.double, (on(device),)), device, torch.tensor([0.0, 2.0, 4.0]))
        assert_on(rpc.remote("worker0", fn.double, (on(device),)).to_here(), device, torch.tensor([0.0, 2.0, 4.0]))


def test_a_call_to_the_own_worker_needs_no_map() -> None:
    job(_own_worker, FORTH, {})


def _own_map() -> None:
    assert rpc.rpc_sync("worker0", fn.device, (on("lazy:0"),)) == "lazy:4"
    assert_on(rpc.rpc_sync("worker0", fn.double, (on("lazy:0"),)), "lazy:0", torch.tensor([0.0, 2.0, 4.0]))


def test_a_map_for_the_own_worker_is_used() -> None:
    job(_own_map, {"worker0": {"lazy:0": "lazy:4"}})


def _both_directions() -> None:
    # Our lazy:2 is lazy:5 on worker 1, which sends its lazy:5 to our lazy:7; the answer takes the inverse.
    assert_on(rpc.rpc_sync("worker1", fn.pass_on, ("worker0", on("lazy:2"))), "lazy:2", torch.tensor([0.0, 3.0, 6.0]))
    assert rpc.rpc_sync("worker1", rpc.rpc_sync, ("worker0", fn.device, (on("lazy:2"),))) == "lazy:7"


def test_maps_in_both_directions_at_once() -> None:
    job(_both_directions, FORTH, {"worker0": {"lazy:5": "lazy:7"}})


def _cpu_as_a_source() -> None:
    assert rpc.rpc_sync("worker1", fn.device, (torch.ones(3),)) == "lazy:1"
    assert rpc.rpc_async("worker1", fn.device, (torch.ones(3),)).wait() == "lazy:1"
    assert rpc.remote("worker1", fn.device, (torch.ones(3),)).to_here() == "lazy:1"
    back = rpc.rpc_sync("worker1", fn.same, (torch.arange(3), [torch.arange(3)]))
    assert_on(back[0], "cpu", torch.arange(3))
    parameter = torch.nn.Parameter(torch.ones(3))
    assert rpc.rpc_sync("worker1", fn.about, (parameter,)) == ("lazy:1", True, True)
    assert rpc.rpc_sync("worker0", fn.device, (torch.ones(3),)) == "cpu"


def test_a_map_can_move_tensors_from_the_cpu() -> None:
    job(_cpu_as_a_source, {"worker1": {"cpu": "lazy:1"}}, {})


def _cpu_as_a_target() -> None:
    assert rpc.rpc_sync("worker1", fn.device, (on("lazy:1"),)) == "cpu"
    assert_on(rpc.rpc_sync("worker1", fn.double, (on("lazy:1"),)), "lazy:1", torch.tensor([0.0, 2.0, 4.0]))
    # The inverse applies to all tensors on the callee's CPU, as in torch.
    assert rpc.rpc_sync("worker1", fn.made_on, ("cpu",)).device == torch.device("lazy:1")
    assert rpc.rpc_sync("worker1", fn.how_many_ran) == 1


def test_a_map_can_move_tensors_to_the_cpu() -> None:
    job(_cpu_as_a_target, {"worker1": {"lazy:1": "cpu"}}, {})


def _not_mapped() -> None:
    text = r"tensor on lazy:3 can't be sent to worker1.*set_device_map\(\"worker1\", \{\"lazy:3\": "
    with pytest.raises(UsageError, match=text):
        rpc.rpc_sync("worker1", fn.device, (on("lazy:3"),))
    with pytest.raises(UsageError, match=text):
        rpc.rpc_async("worker1", fn.device, (torch.ones(1), [on("lazy:3")]))
    with pytest.raises(UsageError, match=text):
        rpc.remote("worker1", fn.device, (on("lazy:3"),))
    with profile(), pytest.raises(UsageError, match=text):
        rpc.rpc_sync("worker1", fn.device, (on("lazy:3"),))
    assert rpc.rpc_sync("worker1", fn.how_many_ran) == 0
    with pytest.raises(UsageError, match="can't be sent to worker2"):
        rpc.rpc_sync("worker2", fn.device, (on("lazy:0"),))
    back = r"tensor on lazy:3 can't be sent back to worker0.*worker0 say so.*set_device_map\(\"worker1\", .*\"lazy:3\""
    with pytest.raises(UsageError, match=back):
        rpc.rpc_sync("worker1", fn.made_on, ("lazy:3",))
    made = rpc.remote("worker1", fn.made_on, ("lazy:3",))
    with pytest.raises(UsageError, match=back):
        made.to_here()
    assert rpc.rpc_sync("worker1", fn.double, (torch.ones(1),)) == 2


def test_an_unmapped_device_is_an_error_before_anything_is_sent() -> None:
    job(_not_mapped, FORTH, {}, {})


def _device_missing_on_callee() -> None:
    with pytest.raises(UsageError, match="can't put a tensor on its device xpu:1"):
        rpc.rpc_sync("worker1", fn.device, (on("lazy:0"),))


def test_a_device_that_the_callee_does_not_have_is_an_error() -> None:
    job(_device_missing_on_callee, {"worker1": {"lazy:0": "xpu:1"}}, {})
