"""``rpc.expose``: the names of exposed objects, and the objects that it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import NotExposedError, UsageError
from farprop.wire import exposed
from farprop.wire.message import Method
from tests.security.functions import Counter, Doubled, Half, add, hidden, make_doubled, multiply


def test_exposed_objects_are_found_by_name() -> None:
    assert exposed.find(b"tests.security.functions:add") is add
    assert exposed.find(b"times") is multiply
    assert exposed.find(b"tests.security.functions:multiply") is None
    assert exposed.find(b"torch:mul") is torch.mul
    assert exposed.find(b"torch.optim.sgd:SGD") is torch.optim.SGD
    assert exposed.find(b"tests.security.functions:hidden") is None
    assert exposed.name_of(multiply) == b"times"
    assert exposed.name_of("any text") == b"any text"
    assert exposed.name_of(hidden) == b"tests.security.functions:hidden"  # the callee decides
    assert exposed.name_of(Counter.named) == b"tests.security.functions:Counter.named"
    assert exposed.name_of(lambda: 1) is None
    assert exposed.name_of(Counter().add) is None
    assert exposed.name_of([]) is None


def test_only_exposed_methods_are_callable() -> None:
    assert exposed.is_method_exposed(Counter(), "add")
    assert exposed.is_method_exposed(Doubled(), "add")
    assert not exposed.is_method_exposed(Counter(), "reset")
    assert not exposed.is_method_exposed(Counter(), "__call__")
    assert exposed.is_method_exposed(Half(1, 1), "__call__")
    assert not exposed.is_method_exposed(Half(1, 1), "parameters")
    assert exposed.is_method_exposed(torch.nn.Linear(1, 1), "parameters")
    assert not exposed.is_method_exposed(torch.nn.Bilinear(1, 1, 1), "parameters")
    counter = Counter()
    counter.reset = counter.add  # type: ignore[method-assign]
    assert not exposed.is_method_exposed(counter, "reset")


def test_wrapper_of_an_exposed_method_is_exposed() -> None:
    def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any) -> Any:
            return function(*args)

        return wrapper

    class Local:
        @wrapping
        @rpc.expose
        def method(self) -> None:
            pass

    assert exposed.is_method_exposed(Local(), "method")


def _reloaded() -> Any:
    """A function as a module defines it each time it is loaded."""

    def twice() -> None:
        pass

    twice.__module__, twice.__qualname__ = __name__, "twice"
    return twice


def test_two_objects_cannot_have_the_same_name() -> None:
    rpc.expose(add)
    first, second = _reloaded(), _reloaded()
    rpc.expose(first)
    rpc.expose(second)
    assert exposed.find(f"{__name__}:twice".encode()) is second
    with pytest.raises(UsageError, match="Two things are exposed as 'times'"):
        rpc.expose(make_doubled, name="times")


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_unsuitable_objects_are_refused() -> None:
    with pytest.raises(UsageError, match="has no name"):
        rpc.expose(lambda: 1)
    with pytest.raises(UsageError, match="Functions, methods and classes"):
        rpc.expose(5)
    with pytest.raises(UsageError, match="TorchScript"):
        rpc.expose(scripted)
    with pytest.raises(UsageError, match="TorchScript"):
        rpc.expose(rpc.functions.async_execution(scripted))
    with pytest.raises(UsageError, match="is a method"):
        rpc.expose(name="x")(Counter.reset)
    with pytest.raises(UsageError, match="has no method 'no_such_method'"):
        rpc.expose(Counter, methods=["no_such_method"])
    with pytest.raises(UsageError, match="methods= is for classes"):
        rpc.expose(add, methods=["x"])


def test_local_class_can_be_exposed_under_a_given_name() -> None:
    @rpc.expose(name="a local dataclass")
    @dataclass
    class Local:
        x: int
        y: int = 2

    assert exposed.find(b"a local dataclass") is Local
    assert exposed.fields_of(Local) == ("x", "y")
    assert exposed.fields_of(Counter) is None


def test_restricted_jobs_list_every_internal_method() -> None:
    """A method that is not in the table is refused, so the table has to list them all, but for those of parcels."""
    from farprop.rpc import restricted

    parcels = {Method.PARCEL, Method.PARCEL_CHUNK, Method.PARCEL_SHARE, Method.PARCEL_DROP}
    assert set(restricted._INTERNAL).isdisjoint(method.value for method in parcels)
    assert {method.value for method in Method if method not in parcels} <= set(restricted._INTERNAL)
    with pytest.raises(NotExposedError, match="method 29"):
        restricted._vet(b"\x1d", 1, "worker1", (), {})
