"""Where in a message references can be sent, and the errors everywhere else."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import time
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import RemoteError, UsageError
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import wait_until
from tests.support.workers import Cluster


def _outside_of_calls() -> None:
    for rref in (rpc.RRef(5), rpc.remote("worker1", f.add, args=(1,))):
        for store in (
            pickle.dumps,
            cloudpickle.dumps,
            copy.copy,
            copy.deepcopy,
            lambda value: torch.save(value, io.BytesIO()),
            lambda value: pickle.dumps([{"deep": (value,)}]),
            lambda value: pickle.dumps(value, protocol=2),
        ):
            with pytest.raises(UsageError, match=r"can only be pickled when using RPC.*call to_here\(\)"):
                store(rref)  # type: ignore[operator]
        assert rref.to_here() in (5, 2)


def test_references_can_not_be_pickled_or_copied_outside_of_calls(workers: Cluster) -> None:
    workers.run(0, _outside_of_calls)


@dataclass
class Box:
    content: Any
    label: str = ""


class WithState:
    """Has a ``__reduce__`` of its own."""

    def __init__(self, rref: Any) -> None:
        self.rref = rref

    def __reduce__(self) -> Any:
        return WithState, (self.rref,)

    def value(self, plus: int) -> Any:
        return self.rref.to_here() + plus


def _dig(value: Any) -> Any:
    return value[0]["a"][0].content[1].content["rref"].to_here()


def _dig_and_return(value: Any) -> Any:
    return Box([value[0]["a"][0].content[1].content["rref"]], "back")


def _keyword(*, rref: Any, others: Any = ()) -> Any:
    return [rref.to_here(), *(other.to_here() for other in others)]


def _at_all_depths() -> None:
    mine = rpc.RRef(40)
    theirs = rpc.remote("worker1", f.add, args=(1,))
    third = rpc.remote("worker2", f.add, args=(2,))
    for rref, value in ((mine, 40), (theirs, 2), (third, 3)):
        deep = ({"a": [Box((None, Box({"rref": rref})))]},)
        assert rpc.rpc_sync("worker1", _dig, args=(deep,)) == value
        assert rpc.rpc_async("worker1", _dig, args=(deep,)).wait() == value
        assert rpc.remote("worker1", _dig, args=(deep,)).to_here() == value
        back = rpc.rpc_sync("worker1", _dig_and_return, args=(deep,))
        assert back.label == "back"
        assert back.content[0].to_here() == value
        assert rpc.rpc_sync("worker1", _keyword, kwargs={"rref": rref, "others": {rref}}) == [value, value]
        assert rpc.rpc_sync("worker1", lambda: rref.to_here()) == value  # noqa: B023
        assert rpc.rpc_sync("worker1", lambda plus, r=rref: r.to_here() + plus, args=(1,)) == value + 1
        assert rpc.rpc_sync("worker1", functools.partial(_keyword, rref=rref)) == [value]
        assert rpc.rpc_sync("worker1", WithState(rref).value, args=(2,)) == value + 2
        assert rpc.remote("worker1", WithState(rref).value, args=(2,)).to_here() == value + 2
        # beside tensors in shared memory, and views that make the codec start again
        base = torch.rand(200_000)
        got = rpc.rpc_sync("worker1", f.identity, args=([base[:10], rref, base, base[5:]],))
        assert torch.equal(got[2], base)
        assert got[1].to_here() == value


def test_references_deep_in_a_message(workers: Cluster) -> None:
    workers.run(0, _at_all_depths)


def _are_identical(first: Any, second: Any, box: Any) -> bool:
    return first is second and box.content is first


def _forks() -> int:
    return int(rpc._rref_context_get_debug_info()["num_forks"])


def _same_reference_twice() -> None:
    for rref in (rpc.RRef(1), rpc.remote("worker1", f.noop), rpc.remote("worker2", f.noop)):
        assert rpc.rpc_sync("worker1", _are_identical, args=(rref, rref, Box(rref)))
        first, second = rpc.rpc_sync("worker1", f.identity, args=((rref, rref),))
        assert first is second
    rref = rpc.remote("worker1", f.add, args=(1,))
    results = rpc.rpc_sync("worker2", f.identity, args=([rref, rref],))
    wait_until(lambda: rpc.rpc_sync("worker1", _forks) == 2, "one fork is ours, one has come back")
    assert results[0].to_here() == 2


def test_a_reference_that_is_sent_twice_arrives_as_one_object(workers: Cluster) -> None:
    workers.run(0, _same_reference_twice)


class Carrier(Exception):
    def __init__(self, text: str, rref: Any) -> None:
        super().__init__(text, rref)
        self.rref = rref


def _raise_with_attribute(rref: Any) -> None:
    error = ValueError("has a reference")
    error.rref = rref  # type: ignore[attr-defined]
    raise error


def _raise_with_argument(rref: Any) -> None:
    raise Carrier("carries a reference", rref)


def _in_exceptions() -> None:
    for rref in (rpc.RRef(g.Thing("in an error")), rpc.remote("worker1", g.Thing), rpc.remote("worker2", g.Thing)):
        for function, text in ((_raise_with_attribute, "has a reference"), (_raise_with_argument, "carries")):
            began = time.monotonic()
            with pytest.raises(RemoteError, match=text) as caught:
                rpc.rpc_sync("worker1", function, args=(rref,))
            assert "RRef" in str(caught.value) or "ValueError" in caught.value.type_name
            with pytest.raises(RemoteError, match=text):
                rpc.rpc_async("worker1", function, args=(rref,)).wait()
            with pytest.raises(RemoteError, match=text):
                rpc.remote("worker1", function, args=(rref,)).to_here()
            assert time.monotonic() - began < 20


def test_references_in_exceptions_are_not_sent(workers: Cluster) -> None:
    workers.run(0, _in_exceptions)


def _make_reference(value: Any) -> Any:
    return rpc.RRef(value)


def _references_to_references() -> None:
    inner = rpc.RRef(7)
    outer = rpc.RRef(inner)
    assert rpc.rpc_sync("worker1", g.to_here, args=(outer,)).to_here() == 7
    assert rpc.rpc_sync("worker1", lambda r: r.to_here().to_here(), args=(outer,)) == 7
    made = rpc.remote("worker1", _make_reference, args=(8,))
    assert made.to_here().to_here() == 8
    assert made.to_here().owner_name() == "worker1"
    assert made.rpc_sync().to_here() == 8
    far = rpc.remote("worker1", rpc.remote, args=("worker2", f.add, (3,)))
    assert far.to_here().owner_name() == "worker2"
    assert far.to_here().to_here() == 4
    wrapped = rpc.remote("worker2", f.identity, args=(far,))
    assert wrapped.to_here().to_here().to_here() == 4


def test_a_reference_to_a_reference(workers: Cluster) -> None:
    workers.run(0, _references_to_references)


class Doubling(rpc.internal._InternalRPCPickler):
    def serialize(self, obj: Any) -> Any:
        return super().serialize(obj._replace(args=(*obj.args, *obj.args)))


def _both_values(*rrefs: Any) -> list[Any]:
    return [rref.to_here() for rref in rrefs]


def _custom_pickler() -> None:
    mine, theirs, third = rpc.RRef(1), rpc.remote("worker1", f.add, args=(1,)), rpc.remote("worker2", f.add, args=(2,))
    with rpc._use_rpc_pickler(Doubling()):
        assert rpc.rpc_sync("worker1", _both_values, args=(mine, theirs, third)) == [1, 2, 3, 1, 2, 3]
        assert rpc.remote("worker1", _both_values, args=(third,)).to_here() == [3, 3]


def test_a_custom_pickler_sends_references(workers: Cluster) -> None:
    workers.run(0, _custom_pickler)


class RaisesWhenUnpickled:
    def __init__(self, rref: Any) -> None:
        self.rref = rref

    def __reduce__(self) -> Any:
        return _raise_when_unpickled, (self.rref,)


def _raise_when_unpickled(rref: Any) -> None:
    raise OSError("not today")


def _return_unreadable(rref: Any) -> Any:
    return RaisesWhenUnpickled(rref)


class RaisesWhenPickled:
    def __reduce__(self) -> Any:
        raise OSError("not written")


def _return_unwritable(rref: Any) -> Any:
    return [rref, RaisesWhenPickled()]


def _broken_messages() -> None:
    """Failed calls must not leak the references in them."""
    for owner in ("worker0", "worker1", "worker2"):
        rref = rpc.remote(owner, g.Thing, args=("spoilt",))
        with pytest.raises(OSError, match="not today"):
            rpc.rpc_sync("worker1", f.identity, args=(RaisesWhenUnpickled(rref),))
        with pytest.raises(OSError, match="not today"):
            rpc.rpc_sync("worker1", _return_unreadable, args=(rref,))
        with pytest.raises(OSError, match="not today"):
            rpc.remote("worker1", _return_unreadable, args=(rref,)).to_here()
        with pytest.raises(OSError, match="not written"):
            rpc.rpc_sync("worker1", f.identity, args=([rref, RaisesWhenPickled()],))
        with pytest.raises(OSError, match="not written"):
            rpc.remote("worker1", f.identity, args=([rref, RaisesWhenPickled()],))
        with pytest.raises(OSError, match="not written"):
            rpc.rpc_sync("worker1", _return_unwritable, args=(rref,))
        with pytest.raises(RuntimeError, match="RPC pickler does not serialize"):
            rpc.rpc_sync("worker1", _gone, args=(rref,))


def _gone(rref: Any) -> None: ...


def _forget_gone() -> None:
    globals().pop("_gone", None)


def test_messages_that_can_not_be_pickled_or_unpickled_leak_no_references(workers: Cluster) -> None:
    workers.run(1, _forget_gone)
    workers.run(0, _broken_messages)
