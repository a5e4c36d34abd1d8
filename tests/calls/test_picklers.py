"""Picklers that a program derives from the RPC pickler."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.rpc.internal import _internal_rpc_pickler, _InternalRPCPickler
from farprop.wire import codec
from tests.calls import functions as f
from tests.support.workers import Cluster, cluster


@pytest.fixture(scope="module")
def workers() -> Iterator[Cluster]:
    with cluster(2) as started:
        yield started


class Unchanged(_InternalRPCPickler):
    """A derived pickler that changes nothing."""


def _scaled(x: torch.Tensor, rref: Any) -> torch.Tensor:
    return x * rref.to_here()


def _gradients() -> None:
    weight = torch.tensor([3.0], requires_grad=True)
    factor = rpc.RRef(torch.tensor([5.0]))
    with rpc._use_rpc_pickler(Unchanged()), dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", _scaled, args=(weight, factor))
        dist_autograd.backward(context_id, [loss.sum()])
        assert dist_autograd.get_gradients(context_id)[weight].tolist() == [5.0]


def test_a_custom_pickler_keeps_gradients_and_references(workers: Cluster) -> None:
    workers.run(0, _gradients)


@rpc.functions.async_execution
def _tripled_later(x: int) -> Any:
    return rpc.rpc_async("worker0", f.add, args=(x, 2 * x))


async def _awaited(x: int) -> int:
    return x + 1


def _functions() -> None:
    offset = 7
    with rpc._use_rpc_pickler(Unchanged()):
        assert rpc.rpc_sync("worker1", _tripled_later, args=(2,)) == 6
        assert rpc.remote("worker1", _tripled_later, args=(3,)).to_here() == 9
        assert rpc.rpc_sync("worker1", _awaited, args=(2,)) == 3
        assert rpc.rpc_sync("worker1", lambda x: x + offset, args=(torch.ones(1),)).tolist() == [8.0]
        with torch.autograd.profiler_legacy.profile() as profile:
            assert rpc.rpc_sync("worker1", f.add, args=(1, 2)) == 3
        assert any("rpc_sync#add(worker0 -> worker1)" in event.name for event in profile.function_events)


def test_a_custom_pickler_serializes_all_kinds_of_functions(workers: Cluster) -> None:
    workers.run(0, _functions)


class Refusing(_InternalRPCPickler):
    def serialize(self, obj: Any) -> Any:
        raise OSError("not through me")


@torch.jit.script
def _compiled(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def _without_the_pickler() -> None:
    with rpc._use_rpc_pickler(Refusing()):
        assert rpc.rpc_sync("worker1", torch.add, args=(torch.ones(1), 1)).tolist() == [2.0]
        assert rpc.rpc_sync("worker1", _compiled, args=(torch.ones(1),)).tolist() == [2.0]
        with pytest.raises(OSError, match="not through me"):
            rpc.rpc_sync("worker1", f.add, args=(1, 2))
        with pytest.raises(OSError, match="not through me"):
            rpc.remote("worker1", f.add, args=(1, 2))


def test_operators_and_script_functions_bypass_the_pickler(workers: Cluster) -> None:
    workers.run(0, _without_the_pickler)


class Unpicklable:
    """Can't be pickled."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __reduce__(self) -> Any:
        raise TypeError("not by pickle")


class OtherUnpicklable(Unpicklable):
    """Can't be pickled, either."""


def _reduce_unpicklable(obj: Unpicklable) -> Any:
    return type(obj), (obj.n + 1,)


def _register() -> None:
    _internal_rpc_pickler._register_reducer(Unpicklable, _reduce_unpicklable)
    _internal_rpc_pickler._register_reducer(Unpicklable, lambda obj: (int, ()))  # the first stays
    _internal_rpc_pickler._dispatch_table[OtherUnpicklable] = _reduce_unpicklable


def _registered_reducers() -> None:
    with pytest.raises(TypeError, match="not by pickle"):
        rpc.rpc_sync("worker1", f.identity, args=(Unpicklable(1),))
    _register()
    rpc.rpc_sync("worker1", _register)
    for kind in (Unpicklable, OtherUnpicklable):
        back = rpc.rpc_sync("worker1", f.identity, args=([kind(1)],))[0]
        assert type(back) is kind
        assert back.n == 3  # one more in the arguments, and one in the result
        assert rpc.remote("worker1", f.identity, args=(kind(1),)).to_here().n == 3


def _reduce_tensor_doubled(tensor: torch.Tensor) -> Any:
    return torch.tensor, ([2 * x for x in tensor.tolist()],)


def _registered_for_tensors() -> None:
    codec.class_reducers[torch.Tensor] = _reduce_tensor_doubled
    try:
        assert rpc.rpc_sync("worker1", f.add, args=(torch.ones(1), 1)).tolist() == [3.0]
    finally:
        del codec.class_reducers[torch.Tensor]
    assert rpc.rpc_sync("worker1", f.add, args=(torch.ones(1), 1)).tolist() == [2.0]


def test_registered_reducers_serialize_arguments_and_results() -> None:
    with cluster(2) as c:
        c.run(0, _registered_reducers)
        c.run(0, _registered_for_tensors)


class Box:
    def __init__(self, rref: Any) -> None:
        self.rref = rref


def _reduce_box(box: Box) -> Any:
    return _unbox, (box.rref._serialize(),)


def _unbox(data: Any) -> Box:
    return Box(rpc.PyRRef._deserialize(data))


class Boxing(_InternalRPCPickler):
    def __init__(self) -> None:
        super().__init__()
        self._register_reducer(Box, _reduce_box)


def _open_box(box: Box) -> Any:
    return box.rref.to_here()


def _serialized_references() -> None:
    mine, theirs = rpc.RRef(1), rpc.remote("worker1", f.add, args=(1, 1))
    with rpc._use_rpc_pickler(Boxing()):
        assert rpc.rpc_sync("worker1", _open_box, args=(Box(mine),)) == 1
        assert rpc.rpc_sync("worker1", _open_box, args=(Box(theirs),)) == 2
    _internal_rpc_pickler._register_reducer(Box, _reduce_box)
    assert rpc.rpc_sync("worker1", _open_box, args=(Box(mine),)) == 1
    assert rpc.rpc_async("worker1", _open_box, args=(Box(theirs),)).wait() == 2
    with pytest.raises(RuntimeError, match="travels only inside the arguments and results"):
        mine._serialize()


def test_reducers_can_send_references() -> None:
    with cluster(2) as c:
        c.run(0, _serialized_references)


def _missing(x: int) -> int:
    return x


def _delete_missing() -> None:
    del globals()["_missing"]


def _call_missing() -> None:
    rpc.rpc_sync("worker1", _delete_missing)
    with (
        rpc._use_rpc_pickler(Unchanged()),
        pytest.raises(AttributeError, match="_missing.*has to be defined in the same module"),
    ):
        rpc.rpc_sync("worker1", _missing, args=(1,))


def test_a_function_that_the_callee_lacks_is_named_in_the_error() -> None:
    with cluster(2) as c:
        c.run(0, _call_missing)


def test_a_failed_pickle_restores_the_tensor_tables() -> None:
    class Nested(_InternalRPCPickler):
        def __init__(self) -> None:
            super().__init__()
            self._register_reducer(Unpicklable, self._reduce)

        def _reduce(self, obj: Unpicklable) -> Any:
            inner, table = rpc.internal.serialize([torch.ones(1)])
            assert len(table) == 1
            if obj.n:
                raise OSError("halfway")
            return rpc.internal.deserialize, (inner, table)

    pickler, tensor = Nested(), torch.zeros(2)
    with pytest.raises(OSError, match="halfway"):
        pickler.serialize([tensor, Unpicklable(1)])
    assert not rpc.internal.is_serializing()
    data, table = pickler.serialize([tensor, Unpicklable(0), tensor])
    assert len(table) == 2  # the other tensor is that of the inner table
    first, inner, again = pickler.deserialize(data, table)
    assert first is again is tensor
    assert inner[0].tolist() == [1.0]
