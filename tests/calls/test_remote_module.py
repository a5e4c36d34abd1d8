"""``RemoteModule``: modules on other workers."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import logging
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.nn.api.remote_module as theirs
from torch import Tensor, nn

import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.nn import RemoteModule
from farprop.nn.remote_module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, _RemoteModule
from tests.support.workers import cluster

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")

made: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class Scale(nn.Module):
    """Multiplies, and counts its calls."""

    def __init__(self, by: float = 2.0) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))
        self.inner = nn.Linear(2, 3)
        self.calls = 0
        made.add(self)

    def forward(self, x: Tensor, plus: float = 0.0) -> Tensor:
        self.calls += 1
        if plus < 0:
            raise ValueError("plus is negative")
        return x * self.by.detach() + plus


class NotAModule:
    pass


def make_late(by: float) -> nn.Module:
    time.sleep(0.2)
    return Scale(by)


def raise_on_creation() -> nn.Module:
    raise KeyError("no module today")


def calls_of(module_rref: Any) -> int:
    return int(module_rref.local_value().calls)


def is_training(module_rref: Any) -> bool:
    module = module_rref.local_value()
    assert module.training == module.inner.training
    return bool(module.training)


def run(function: Callable[..., Any], env: dict[str, str], workers: int = 2) -> None:
    with cluster(workers, env) as c:
        c.run(0, function)


def wait_until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# Calls


def _forward() -> None:
    x = torch.arange(3.0)
    module = RemoteModule("worker1", Scale, (3.0,))
    assert module.on == "worker1"
    assert module.device == "cpu"
    assert module.is_device_map_set is False
    assert module.is_scriptable is False
    assert repr(module) == "RemoteModule(on='worker1', device='cpu')"
    assert torch.equal(module.forward(x), x * 3)
    assert torch.equal(module.forward(x, 1.0), x * 3 + 1)
    assert torch.equal(module(x, plus=2.0), x * 3 + 2)
    futures = [module.forward_async(x, plus=i) for i in range(10)]
    assert all(isinstance(future, torch.futures.Future) for future in futures)
    for i, value in enumerate(torch.futures.wait_all(futures)):
        assert torch.equal(value, x * 3 + i)
    assert rpc.rpc_sync("worker1", calls_of, (module.get_module_rref(),)) == 13
    with pytest.raises(ValueError, match="plus is negative"):
        module.forward(x, -1.0)
    with pytest.raises(ValueError, match="plus is negative"):
        module.forward_async(x, -1.0).wait()
    here = RemoteModule("worker0", Scale, kwargs={"by": 4.0})
    assert torch.equal(here(x), x * 4)
    assert here.get_module_rref().local_value() in made


def test_forward(env: dict[str, str]) -> None:
    run(_forward, env)


def _creation() -> None:
    late = RemoteModule("worker1", make_late, (5.0,))
    assert torch.equal(late(torch.ones(1)), torch.full((1,), 5.0))
    for _ in range(2):
        with pytest.raises(ValueError, match="an instance of <class nn.Module>, but .*NotAModule"):
            RemoteModule("worker1", NotAModule).forward()
        with pytest.raises(KeyError, match="no module today"):
            RemoteModule("worker1", raise_on_creation).forward_async().wait()
    with pytest.raises(TypeError, match="unexpected keyword"):
        RemoteModule("worker1", Scale, kwargs={"bye": 1.0}).remote_parameters()


def test_modules_that_are_created_late_or_not_at_all(env: dict[str, str]) -> None:
    run(_creation, env)


def _workers_and_devices() -> None:
    for place, on, device in (
        ("worker1", "worker1", "cpu"),
        ("worker1/cpu", "worker1", "cpu"),
        ("rank:1", 1, "cpu"),
        ("rank:1/cpu", 1, "cpu"),
        ("worker1/meta", "worker1", "meta"),
        ("cpu", "worker0", "cpu"),
        (torch.device("cpu"), "worker0", "cpu"),
    ):
        module = RemoteModule(place, nn.Linear, (1, 1))  # type: ignore[arg-type]
        assert (module.on, module.device) == (on, device)
        assert module.get_module_rref().owner_name() == ("worker0" if on == "worker0" else "worker1")
    for place in ("/", "/cpu", "//rank:1", "worker1/cpu/cpu", "a:b"):
        with pytest.raises(ValueError, match="Could not parse remote_device"):
            RemoteModule(place, nn.Linear, (1, 1))
    for place in ("worker1/", "worker1/foo", "worker1/cpu2"):
        with pytest.raises(RuntimeError, match="[Dd]evice"):
            RemoteModule(place, nn.Linear, (1, 1))
    for place in ("worker7", "rank:7/cpu"):
        with pytest.raises(UsageError, match="could not find destination"):
            RemoteModule(place, nn.Linear, (1, 1))


def test_all_forms_of_remote_device(env: dict[str, str]) -> None:
    run(_workers_and_devices, env)


class Devices(nn.Module):
    """Returns the devices of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> list[str]:
        assert self.weight.device.type == "meta"
        return [args[0].device.type, args[1]["nested"][0].device.type, kwargs["by_name"].device.type]


def _devices() -> None:
    module = RemoteModule("worker1/meta", Devices)
    x = torch.ones(1)
    assert module(x, {"nested": (x, "text")}, by_name=x) == ["meta"] * 3


def test_tensors_are_moved_to_the_device_of_the_module(env: dict[str, str]) -> None:
    run(_devices, env)


@pytest.mark.one_transport
def test_without_rpc_the_error_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="init_rpc first"):
        RemoteModule("worker1", Scale)


# Other methods


def _other_methods() -> None:
    module = RemoteModule("worker1", Scale, (3.0,))
    reference = module.get_module_rref()
    assert reference is module.module_rref
    assert [p.to_here().shape for p in module.remote_parameters()] == [(), (3, 2), (3,)]
    (by,) = module.remote_parameters(recurse=False)
    assert by.owner_name() == "worker1"
    assert isinstance(by.to_here(), nn.Parameter)
    for switch, expected in (
        (module.eval, False),
        (module.train, True),
        (lambda: module.train(False), False),
        (lambda: module.train(mode=True), True),
    ):
        assert switch() is module
        assert rpc.rpc_sync("worker1", is_training, (reference,)) is expected
    for name in UNSUPPORTED:
        method = getattr(module, name)
        parameters = inspect.signature(method).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        with pytest.raises(ValueError, match=f"Method ``{name}`` not supported for RemoteModule"):
            method(*[None] * len(needed))
    with pytest.raises(ValueError, match="use ``remote_parameters`` instead"):
        module.parameters()
    with pytest.raises(TypeError, match="'no_such'"):
        module.apply(print, no_such=1)


# Torch's RemoteModule raises for these, too.
UNSUPPORTED = [
    *("add_module", "apply", "bfloat16", "buffers", "children", "cpu", "cuda", "double", "extra_repr", "float", "half"),
    *("ipu", "load_state_dict", "modules", "named_buffers", "named_children", "named_modules", "named_parameters"),
    *("parameters", "register_backward_hook", "register_buffer", "register_forward_hook", "register_forward_pre_hook"),
    *("register_parameter", "requires_grad_", "share_memory", "state_dict", "to", "type", "xpu", "zero_grad"),
]


def test_other_methods(env: dict[str, str]) -> None:
    run(_other_methods, env)


class Hybrid(nn.Module):
    def __init__(self, remote: RemoteModule) -> None:
        super().__init__()
        self.remote = remote
        self.local = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.local(self.remote(x))


def _hybrid() -> None:
    model = Hybrid(RemoteModule("worker1", Scale))
    assert torch.equal(model(torch.ones(2)), model.local(torch.full((2,), 2.0)))
    assert "remote" in repr(model)
    model.eval()
    assert rpc.rpc_sync("worker1", is_training, (model.remote.get_module_rref(),)) is False


def test_a_remote_module_in_another_module(env: dict[str, str]) -> None:
    run(_hybrid, env)


@pytest.mark.one_transport
def test_unsupported_methods_are_those_of_torch() -> None:
    public = {name for name in vars(theirs._RemoteModule) if not name.startswith("_")}
    assert public <= set(vars(_RemoteModule))
    assert set(UNSUPPORTED) <= public


# Sending it


class Named(RemoteModule):
    pass


def attributes(module: RemoteModule) -> list[str]:
    return list(vars(module))


def use(module: RemoteModule, x: Tensor) -> tuple[str, Tensor, Tensor, Tensor]:
    by_wait = module.forward_async(x).wait()
    return type(module).__name__, module.forward(x), module(x, plus=1.0), by_wait


def pass_on(module: RemoteModule, to: str, x: Tensor) -> Any:
    return rpc.rpc_sync(to, use, (module, x))


def identity(value: Any) -> Any:
    return value


def _send_to_others() -> None:
    x = torch.ones(2)
    module = RemoteModule("worker1", Scale, (3.0,))
    assert rpc.rpc_sync("worker2", attributes, (module,)) == [
        *_REMOTE_MODULE_PICKLED_ATTRIBUTES,
        "forward_async",
        "forward",
    ]
    for worker in ("worker1", "worker2", "worker0"):
        kind, *results = rpc.rpc_sync(worker, use, (module, x))
        assert kind == "RemoteModule"
        assert [result.tolist() for result in results] == [[3, 3], [4, 4], [3, 3]]
    rpc.rpc_sync("worker2", pass_on, (module, "worker1", x))
    rpc.rpc_sync("worker1", pass_on, (module, "worker2", x))
    assert rpc.rpc_sync("worker1", calls_of, (module.get_module_rref(),)) == 15
    back = rpc.rpc_sync("worker2", identity, (module,))
    assert (back.on, back.device, back.is_scriptable) == ("worker1", "cpu", False)
    assert torch.equal(back(x), x * 3)
    assert len(back.remote_parameters()) == 3
    assert back.eval() is back
    assert rpc.rpc_sync("worker2", use, (Named("rank:1", Scale), x))[0] == "Named"
    # Attributes that were added are not sent, which is logged.
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("farprop.nn").addHandler(handler)
    module.note = "mine"  # type: ignore[assignment]
    assert "note" not in rpc.rpc_sync("worker2", attributes, (module,))
    assert heard == ["The attribute note of a RemoteModule is not sent with it."]
    # A call's result may be its whole dictionary.
    everything = rpc.rpc_sync("worker2", vars, (module,))
    assert torch.equal(everything["forward"](x), x * 3)


def test_a_sent_remote_module_refers_to_the_same_module(env: dict[str, str]) -> None:
    run(_send_to_others, env, 3)


def _from_reference() -> None:
    x = torch.ones(2)
    first = RemoteModule("worker1", Scale, (3.0,))
    reference = first.get_module_rref()
    second = RemoteModule.init_from_module_rref("worker1/cpu", reference)
    third = rpc.rpc_sync("worker2", RemoteModule.init_from_module_rref, ("worker1", reference))
    for module in (first, second, third):
        assert type(module) is RemoteModule
        assert (module.on, module.device) == ("worker1", "cpu")
        assert torch.equal(module(x), x * 3)
    assert rpc.rpc_sync("worker1", calls_of, (reference,)) == 3
    own = RemoteModule.init_from_module_rref("worker0", rpc.RRef(Scale(7.0)))
    assert torch.equal(rpc.rpc_sync("worker2", use, (own, x))[1], x * 7)


def test_init_from_module_rref(env: dict[str, str]) -> None:
    run(_from_reference, env, 3)


def _not_pickled() -> None:
    module = RemoteModule("worker1", Scale)
    message = "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC"
    for way in (pickle.dumps, copy.copy, copy.deepcopy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(RuntimeError, match=message):
            way(module)


def test_pickling_outside_of_calls_raises(env: dict[str, str]) -> None:
    run(_not_pickled, env)


def modules_here() -> int:
    return len(made)


def _released() -> None:
    gc.disable()
    module = RemoteModule("worker1", Scale)
    compiled = torch.jit.script(_RemoteModule("worker1", make_compiled, _module_interface_cls=Scaling))
    module(torch.ones(1))
    compiled(torch.ones(1))
    assert rpc.rpc_sync("worker1", modules_here) >= 1
    del module
    wait_until(lambda: rpc.rpc_sync("worker1", modules_here) == 0)
    references = len(rpc.live_references())
    del compiled
    gc.collect()  # torch's compiled modules are part of cycles
    wait_until(lambda: len(rpc.live_references()) == references - 1)


def test_a_module_is_released_with_its_last_remote_module(env: dict[str, str]) -> None:
    run(_released, env)


# Interfaces


@torch.jit.interface
class Scaling:
    def forward(self, x: Tensor, times: int = 2, label: str | None = None) -> tuple[Tensor, dict[str, int]]:
        pass


@torch.jit.interface
class Negating:
    def forward(self, x: Tensor) -> Tensor:
        pass


@torch.jit.interface
class Idle:
    def forward(self) -> None:
        pass


@torch.jit.interface
class WithoutForward:
    def backward(self, x: Tensor) -> Tensor:
        pass


@torch.jit.interface
class OfClasses:
    def forward(self, x: Tensor, other: Idle) -> Tensor:
        pass


class Compiled(nn.Module):
    def forward(self, x: Tensor, times: int = 2, label: str | None = None) -> tuple[Tensor, dict[str, int]]:
        if times < 0:
            raise ValueError("times is negative")
        return x * times, {"none" if label is None else label: times}


class Negation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


class Idler(nn.Module):
    def forward(self) -> None:
        pass


def make_compiled() -> nn.Module:
    return torch.jit.script(Compiled())


@torch.jit.interface
class RemoteScaling:
    def forward(self, x: Tensor, times: int, label: str | None) -> tuple[Tensor, dict[str, int]]:
        pass

    def forward_async(
        self, x: Tensor, times: int, label: str | None
    ) -> torch.jit.Future[tuple[Tensor, dict[str, int]]]:
        pass


class Both(nn.Module):
    """Modules with remote ones in them, to be compiled as a whole."""

    def __init__(self, scaling: _RemoteModule, negating: _RemoteModule, idle: _RemoteModule) -> None:
        super().__init__()
        self.scaling = scaling
        self.negating = negating
        self.idle = idle

    def forward(self, x: Tensor) -> Tensor:
        answer = self.negating.forward_async(x)
        scaled, labels = self.scaling(x, 3)
        self.idle.forward()
        return answer.wait() + scaled + labels["none"]


def _interfaces() -> None:
    x = torch.ones(2)
    module = _RemoteModule("worker1", Compiled, _module_interface_cls=Scaling)
    assert module.is_scriptable is True
    signature = inspect.signature(module.forward)
    assert str(signature).startswith("(x: torch.Tensor, times: int = 2, label: Optional[str] = None) -> Tuple[")
    assert inspect.signature(module.forward_async).parameters == signature.parameters
    compiled = torch.jit.script(module)
    for one in (module, compiled):
        assert (one.on, one.device, one.is_scriptable) == ("worker1", "cpu", True)
        assert one.module_rref.owner_name() == "worker1"
        for value, labels in (one(x), one.forward(x), one.forward(x=x, times=2), one.forward_async(x).wait()):
            assert torch.equal(value, x * 2)
            assert labels == {"none": 2}
        assert one.forward_async(x, 3, label="a").wait()[1] == {"a": 3}
        with pytest.raises(Exception, match="times is negative"):
            one(x, -1)
        with pytest.raises(Exception, match="times is negative"):
            one.forward_async(x, -1).wait()
        with pytest.raises((RuntimeError, TypeError), match="times|int"):
            one(x, "no number")

    @torch.jit.script
    def in_compiled_code(module: RemoteScaling, x: Tensor) -> Tensor:
        answers = [module.forward_async(x, i, None) for i in range(10)]
        total = module.forward(x, 100, "sum")[0]
        for answer in answers:
            value, labels = answer.wait()
            total = total + value + labels["none"]
        return total

    assert torch.equal(in_compiled_code(compiled, x), x * (100 + 45 + 45))

    negating = _RemoteModule("worker1", Negation, _module_interface_cls=Negating)
    idle = _RemoteModule("worker1", Idler, _module_interface_cls=Idle)
    both = Both(module, negating, idle)
    assert torch.equal(both(x), x * 5)
    assert torch.equal(torch.jit.script(both)(x), x * 5)


def test_interfaces(env: dict[str, str]) -> None:
    run(_interfaces, env)


def compile_and_use(module: RemoteModule) -> list[float]:
    return list(torch.jit.script(module)(torch.ones(1)).tolist())


def compile_reference_and_use(module_rref: Any) -> list[float]:
    return compile_and_use(RemoteModule.init_from_module_rref("worker1", module_rref, Negating))


def _passing_interfaces() -> None:
    module = _RemoteModule("worker1", Negation, _module_interface_cls=Negating)
    assert rpc.rpc_sync("worker2", compile_and_use, (module,)) == [-1]
    compiled = torch.jit.script(module)
    with pytest.raises(RuntimeError, match="Passing a script RemoteModule over RPC is not supported. .*module_rref"):
        rpc.rpc_sync("worker2", identity, (compiled,))
    assert rpc.rpc_sync("worker2", compile_reference_and_use, (compiled.module_rref,)) == [-1]
    with pytest.raises(torch.jit.Error, match="can only be pickled when using RPC"):
        torch.save(compiled, io.BytesIO())
    with pytest.raises(RuntimeError, match="init_from_module_rref"):
        torch.jit.save(compiled, io.BytesIO())


def test_sending_a_module_with_an_interface(env: dict[str, str]) -> None:
    run(_passing_interfaces, env, 3)


def _wrong_interfaces() -> None:
    for interface, message in (
        (Scale, "Decorate the class with @torch.jit.interface"),
        (WithoutForward, "has no method forward"),
        (OfClasses, "takes or returns objects of a class"),
    ):
        with pytest.raises(ValueError, match=message):
            _RemoteModule("worker1", Negation, _module_interface_cls=interface)
    other = _RemoteModule("worker1", Compiled, _module_interface_cls=Negating)
    with pytest.raises(ValueError, match="Compiled.* does not implement .*Negating"):
        other(torch.ones(1))


def test_wrong_interfaces(env: dict[str, str]) -> None:
    run(_wrong_interfaces, env)
