"""``RRef`` and ``remote``: their attributes and errors, the functions they can call, and ``to_here``."""

from __future__ import annotations

import re
import threading
import traceback
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError, UsageError
from farprop.ids import WorkerInfo
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import owned, wait_until
from tests.support.workers import Cluster

_ID = r"GloballyUniqueId\(created_on=0, local_id=\d+\)"


def _owned_reference() -> None:
    value = g.Thing("own")
    rref = rpc.RRef(value)
    assert rref.is_owner()
    assert rref.owner() == rpc.get_worker_info()
    assert rref.owner_name() == "worker0"
    assert rref.confirmed_by_owner()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.to_here(timeout=0.001) is value
    assert re.fullmatch(rf"OwnerRRef\({_ID}\)", str(rref))
    assert re.fullmatch(re.escape(f"<{rref} here on worker0: Thing, ") + r"[\d.]+ s old>", repr(rref))
    assert rref._get_type() is g.Thing
    assert rref._get_type(blocking=False).wait() is g.Thing
    with pytest.raises(UsageError, match="does not come from rpc.remote"):
        rref._get_future()
    assert owned() == 0  # no other worker refers to it


def _user_reference() -> None:
    rref = rpc.remote("worker1", f.add, args=(1, 2))
    assert not rref.is_owner()
    assert rref.owner() == WorkerInfo("worker1", 1)
    assert rref.owner_name() == "worker1"
    assert rref.to_here() == 3
    assert rref.to_here() == 3
    assert rref._get_future().wait() is None
    assert rref.confirmed_by_owner()
    assert re.fullmatch(rf"UserRRef\(RRefId = {_ID}, ForkId = {_ID}\)", str(rref))
    start = f"<{rref} to a value on worker1: confirmed, made by "
    assert repr(rref).startswith(start)
    assert repr(rref).endswith(" s old>")
    assert rref._get_type() is int
    future = rref._get_type(blocking=False)
    assert future.wait() is int
    assert rref._get_type(blocking=False) is future
    with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user .*worker0.* on owner .*worker1"):
        rref.local_value()


def _pending_reference() -> None:
    rref = rpc.remote("worker1", g.at_gate, args=("made", 5))
    assert not rref.confirmed_by_owner()
    assert "to a value on worker1: creating, made by " in repr(rref)
    future = rref._get_future()
    assert not future.done()
    with pytest.raises(RpcTimeoutError, match="set timeout"):
        rref.to_here(timeout=0.05)
    with pytest.raises(RpcTimeoutError, match="set timeout"):
        rref._get_type(timeout=0.05)
    kind = rref._get_type(blocking=False)
    rpc.rpc_sync("worker1", g.open_gate, args=("made",))
    assert rref.to_here() == 5
    assert kind.wait() is int
    assert future.wait() is None
    assert rref.confirmed_by_owner()


@pytest.mark.parametrize("body", [_owned_reference, _user_reference, _pending_reference])
def test_attributes_of_a_reference(workers: Cluster, body: Any) -> None:
    workers.run(0, body)


@rpc.functions.async_execution
def _later(value: Any) -> torch.futures.Future[Any]:
    return rpc.rpc_async("worker2", f.add, args=(value,))


def _every_kind() -> None:
    a, b = torch.rand(3, 3), torch.rand(3, 3)

    def make(fn: Any, *args: Any, **kwargs: Any) -> Any:
        return rpc.remote("worker1", fn, args=args, kwargs=kwargs).to_here()

    assert torch.equal(make(torch.add, a, b), a + b)
    assert torch.equal(make(torch.add, a, b, alpha=2), a + 2 * b)
    assert torch.equal(make(f.scripted, a, b), a * b + 1)
    module = torch.jit.script(f.ScriptedModule())
    assert torch.equal(make(module.twice, torch.ones(2)), torch.full((2,), 6.0))
    assert make(f.add, 1, c=5) == 7
    assert make(min, 3, 2) == 2
    assert make(f.Counter(5).plus, 2) == 7
    assert make(f.Counter, 9).value == 9
    assert make(f.Counter.of_class, 1) == 101
    factor = 5
    assert make(lambda x: x * factor, 4) == 20
    assert torch.equal(make(f.coroutine, a), a + 1)
    assert make(_later, 4) == 5
    assert make(f.noop) is None
    large = torch.rand(300_000)
    assert torch.equal(make(f.identity, large), large)
    assert rpc.remote(1, f.own_name).to_here() == "worker1"
    assert rpc.remote(rpc.get_worker_info("worker1"), f.own_name).to_here() == "worker1"


def test_remote_of_every_kind_of_callable(workers: Cluster) -> None:
    workers.run(0, _every_kind)


def _wrong_arguments() -> None:
    with pytest.raises(TypeError, match="callable"):
        rpc.remote("worker1", 5)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="could not find destination 'nobody'"):
        rpc.remote("nobody", f.noop)
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object"):
        rpc.remote("worker1", f.identity, args=(threading.Lock(),))
    for timeout in (-0.5, -2, float("nan")):
        with pytest.raises(ValueError, match="A timeout is 0"):
            rpc.remote("worker1", f.noop, timeout=timeout)
    for rref in (rpc.remote("worker1", f.add, args=(1,)), rpc.remote("worker0", f.add, args=(1,)), rpc.RRef(2)):
        for timeout in (-0.5, -2, float("nan")):
            with pytest.raises(ValueError, match="A timeout is 0"):
                rref.to_here(timeout=timeout)
        for timeout in (0, 1e9, 1e12, float("inf")):
            assert rref.to_here(timeout=timeout) == 2


def test_wrong_arguments_raise(workers: Cluster) -> None:
    workers.run(0, _wrong_arguments)


def _endless_waits() -> list[Any]:
    """Timeouts that are too large for a lock."""
    pending = [rpc.remote(to, g.at_gate, args=("endless", to)) for to in ("worker0", "worker1")]
    waiters = []
    got: list[Any] = []
    for rref in pending:
        for timeout in (1e12, float("inf"), 0.0):
            waiters.append(threading.Thread(target=lambda r=rref, t=timeout: got.append(r.to_here(timeout=t))))
            waiters[-1].start()
    for to in ("worker0", "worker1"):
        rpc.rpc_sync(to, g.open_gate, args=("endless",))
    for waiter in waiters:
        waiter.join(30)
    return sorted(got)


def test_huge_timeouts_wait_forever(workers: Cluster) -> None:
    assert workers.run(0, _endless_waits) == ["worker0"] * 3 + ["worker1"] * 3


def _remote_to_own_worker() -> None:
    rref = rpc.remote("worker0", g.at_gate, args=("self", [1, 2]))
    assert rref.is_owner()
    assert rref.owner_name() == "worker0"
    assert " here on worker0: pending, made by " in repr(rref)
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.05)
    done = rref._get_future()
    g.open_gate("self")
    value = rref.local_value()
    assert value == [1, 2]
    assert rref.to_here() is value
    assert done.wait() is None
    assert rref._get_type() is list
    failed = rpc.remote("worker0", f.raise_custom)
    depths = []
    for _ in range(3):
        with pytest.raises(f.Custom) as caught:
            failed.to_here()
        assert (caught.value.code, caught.value.extra) == (7, [1, 2])  # type: ignore[attr-defined]
        depths.append(len(traceback.extract_tb(caught.value.__traceback__)))
    assert depths[0] == depths[1] == depths[2]
    assert ": failed, made by tests.calls.functions:raise_custom, " in repr(failed)


def test_remote_to_the_own_worker(workers: Cluster) -> None:
    workers.run(0, _remote_to_own_worker)


async def _coroutine_that_raises() -> None:
    raise f.Custom(7, "seven")


@rpc.functions.async_execution
def _future_that_raises() -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_exception(f.Custom(7, "seven"))
    return future


def _failures() -> None:
    for function in (f.raise_custom, _coroutine_that_raises, _future_that_raises):
        rref = rpc.remote("worker1", function)
        for _ in range(3):
            with pytest.raises(f.Custom) as caught:
                rref.to_here()
            error = caught.value
            assert (error.code, error.text) == (7, "seven")
            assert len(error.__notes__) == 1
            assert "Raised on worker1" in error.__notes__[0]
        assert rref._get_future().wait() is None  # the reference is there, and has the error
        assert rref.confirmed_by_owner()
        with pytest.raises(f.Custom):
            rref._get_type()
        with pytest.raises(f.Custom):
            rref.rpc_sync().anything()
    with pytest.raises(f.Custom) as caught:
        rpc.remote("worker1", f.raise_custom).to_here()
    assert caught.value.extra == [1, 2]  # type: ignore[attr-defined]
    assert "raise_custom" in caught.value.__notes__[0]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        rpc.remote("worker1", f.add).to_here()


def test_to_here_raises_the_error_of_the_function(workers: Cluster) -> None:
    workers.run(0, _failures)


def _unpicklable() -> None:
    rref = rpc.remote("worker1", g.Thing, args=("unpicklable",))
    for _ in range(2):
        with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object") as caught:
            rref.to_here()
        assert "worker1 could not encode" in "".join(caught.value.__notes__)
    assert rref._get_type() is g.Thing
    assert rref.rpc_sync().plus(3) == 3
    assert rref.rpc_sync().plus(4) == 7


def test_an_unpicklable_value_can_be_used_on_its_owner(workers: Cluster) -> None:
    workers.run(0, _unpicklable)


def _takes(rref: rpc.RRef[int], other: rpc.RRef[Any]) -> rpc.RRef[str]:
    raise NotImplementedError


def _generic() -> None:
    made = rpc.RRef[int](5, type_hint=int)
    assert made.to_here() == 5
    assert rpc.rpc_sync("worker1", g.to_here, args=(made,)) == 5
    assert rpc.RRef[int].__origin__ is rpc.RRef  # type: ignore[attr-defined]
    assert rpc.PyRRef is rpc.RRef


def test_rref_is_generic(workers: Cluster) -> None:
    import typing

    hints = typing.get_type_hints(_takes)
    assert hints["rref"] == rpc.RRef[int]
    assert hints["return"] == rpc.RRef[str]
    workers.run(0, _generic)


def test_rref_without_rpc_raises() -> None:
    with pytest.raises(UsageError, match="has not been initialized"):
        rpc.RRef(5)
    with pytest.raises(UsageError, match="has not been initialized"):
        rpc.remote("worker1", f.noop)
    with pytest.raises(UsageError, match="has not been initialized"):
        rpc.live_references()


def _many_waiters() -> None:
    rref = rpc.remote("worker1", g.at_gate, args=("waiters", 3))
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(rref.to_here())) for _ in range(20)]
    for thread in threads:
        thread.start()
    wait_until(lambda: rpc._get_debug_info()["agent.client_active_calls"] == "21")
    assert got == []
    rpc.rpc_sync("worker1", g.open_gate, args=("waiters",))
    for thread in threads:
        thread.join(30)
    assert got == [3] * 20


def test_many_threads_wait_for_one_value(workers: Cluster) -> None:
    workers.run(0, _many_waiters)
