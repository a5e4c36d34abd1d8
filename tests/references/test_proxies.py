"""``rref.rpc_sync()``, ``rref.rpc_async()``, ``rref.remote()``: methods of a value, called on its owner."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from farprop.testing import faults
from tests.references import functions as g
from tests.references.looking import become_empty, wait_until
from tests.support.workers import Cluster

# A value on another worker, and one on the own worker.
BOTH = pytest.mark.parametrize("owner", ["worker1", "worker0"])


def _sync_async_and_remote(owner: str) -> None:
    rref = rpc.remote(owner, g.Thing, args=("proxied",))
    assert rref.rpc_sync().plus(3) == 3
    assert rref.rpc_sync().plus(n=2, times=2) == 7
    future = rref.rpc_async().plus(1)
    assert isinstance(future, torch.futures.Future)
    assert future.wait() == 8
    made = rref.remote().plus(1, times=2)
    assert isinstance(made, rpc.RRef)
    assert made.owner_name() == owner
    assert made.to_here() == 10
    proxy = rref.rpc_sync()
    assert [proxy.plus(1), proxy.plus(1)] == [11, 12]
    # a result that can't be pickled, and a method of it
    assert rref.remote().make("made by a method").rpc_sync().plus(5) == 5


@BOTH
def test_sync_async_and_remote(workers: Cluster, owner: str) -> None:
    workers.run(0, _sync_async_and_remote, owner)


def _kinds_of_methods(owner: str) -> None:
    rref = rpc.remote(owner, g.Thing, args=("kinds",))
    rref.rpc_sync().plus(1)
    # a callable that only this instance has
    assert rref.rpc_sync().double(4) == 8
    assert rref.rpc_async().double(4).wait() == 8
    assert rref.remote().double(4).to_here() == 8
    # a coroutine
    assert rref.rpc_sync().soon(2) == 3
    assert rref.rpc_async().soon(2).wait() == 3
    assert rref.remote().soon(2).to_here() == 3
    # one that returns a future
    waiting = rref.rpc_async().later("kinds")
    pending = rref.remote().later("kinds")
    assert not waiting.done()
    rpc.rpc_sync(owner, g.open_gate, args=("kinds",))
    assert waiting.wait() == pending.to_here() == rref.rpc_sync().later("kinds") == "kinds"
    # what Python looks up on the class
    adder = rpc.remote(owner, g.Adder, args=(5,))
    assert adder.rpc_sync()(2) == 7
    assert adder.rpc_async()(2).wait() == 7
    assert adder.remote()(2).to_here() == 7


@BOTH
def test_kinds_of_methods(workers: Cluster, owner: str) -> None:
    workers.run(0, _kinds_of_methods, owner)


def _failing(owner: str) -> None:
    rref = rpc.remote(owner, g.Thing, args=("failing",))
    for method in ("fail", "later_fails"):
        with pytest.raises(KeyError):
            getattr(rref.rpc_sync(), method)()
        with pytest.raises(KeyError):
            getattr(rref.rpc_async(), method)().wait()
        with pytest.raises(KeyError):
            getattr(rref.remote(), method)().to_here()
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        rref.rpc_sync().missing()
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        rref.rpc_async().missing().wait()
    with pytest.raises(AttributeError, match="'Thing' object has no attribute 'missing'"):
        rref.remote().missing()
    with pytest.raises(
        TypeError, match="'name' of a Thing is a str, and not callable.*lambda rref: rref.local_value..\\.name"
    ):
        rref.rpc_sync().name()
    with pytest.raises(TypeError, match="'name' of a Thing is a str"):
        rref.remote().name().to_here()
    for proxy in (rref.rpc_sync(), rref.rpc_async(), rref.remote()):
        with pytest.raises(
            AttributeError, match=f"has no attribute 'upper': .* calls the method name of the value on {owner}"
        ):
            proxy.name.upper()  # a proxy does not know that this is no method
    # neither of these may hang
    for call in (
        lambda: rref.rpc_sync(timeout=20).later_not_a_future(),
        lambda: rref.rpc_async(timeout=20).later_not_a_future().wait(),
        lambda: rref.remote(timeout=20).later_not_a_future().to_here(),
    ):
        with pytest.raises(RuntimeError, match="must return a torch.futures.Future object"):
            call()
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        rref.rpc_sync().plus()
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock'"):
        rref.rpc_sync().set_inner(threading.Lock())


@BOTH
def test_failing_methods(workers: Cluster, owner: str) -> None:
    workers.run(0, _failing, owner)


def _timeouts(owner: str) -> None:
    rref = rpc.remote(owner, g.Thing, args=("slow",))
    assert rref.rpc_sync().plus(0) == 0
    with pytest.raises(RpcTimeoutError, match="set timeout"):
        rref.rpc_sync(timeout=0.05).at_gate("slow")
    with pytest.raises(RpcTimeoutError, match="set timeout"):
        rref.rpc_async(timeout=0.05).at_gate("slow").wait()
    late = rref.remote(timeout=0.5).at_gate("slow")
    with pytest.raises(RpcTimeoutError, match="set timeout"):
        late._get_future().wait()
    with pytest.raises(RpcTimeoutError, match="RRef creation"):
        late.to_here()
    for timeout in (-0.5, float("nan")):
        with pytest.raises(ValueError, match="A timeout is 0"):
            rref.rpc_sync(timeout=timeout).plus(1)
        with pytest.raises(ValueError, match="A timeout is 0"):
            rref.rpc_async(timeout=timeout).plus(1)
        with pytest.raises(ValueError, match="A timeout is 0"):
            rref.remote(timeout=timeout).plus(1)
    rpc.rpc_sync(owner, g.open_gate, args=("slow",))
    assert rref.rpc_sync(timeout=0).at_gate("slow") == "slow"


@BOTH
def test_timeouts_of_methods(workers: Cluster, owner: str) -> None:
    workers.run(0, _timeouts, owner)


def _methods_of_a_pending_value(owner: str) -> None:
    rref = rpc.remote(owner, g.gated_thing, args=("not yet", "not yet"))
    future = rref.rpc_async().double(3)
    with pytest.raises(RpcTimeoutError):
        rref.rpc_sync(timeout=0.05).plus(1)
    with pytest.raises(RpcTimeoutError):
        rref.remote(timeout=0.05).plus(1)
    assert not future.done()
    rpc.rpc_sync(owner, g.open_gate, args=("not yet",))
    assert future.wait() == 6


@BOTH
def test_methods_of_a_pending_value_wait_for_it(workers: Cluster, owner: str) -> None:
    workers.run(0, _methods_of_a_pending_value, owner)


def _as_context_manager(owner: str) -> None:
    rref = rpc.remote(owner, threading.Lock)
    with rref.rpc_sync() as entered:
        assert entered is True
        assert rref.rpc_sync().locked()
    assert not rref.rpc_sync().locked()
    with pytest.raises(KeyError, match="inside"), rref.rpc_sync():
        assert rref.rpc_sync().locked()
        raise KeyError("inside")
    assert not rref.rpc_sync().locked()
    swallower = rpc.remote(owner, g.Swallower)
    with swallower.rpc_sync():
        raise KeyError("swallowed")
    assert swallower.rpc_sync().swallowed() == "KeyError('swallowed')"
    # A future or a reference would report the exception too late.
    for proxy in (rref.rpc_async(), rref.remote()):
        with pytest.raises(TypeError, match="rpc_sync"), proxy:
            pass
    assert not rref.rpc_sync().locked()


@BOTH
def test_a_value_that_is_a_context_manager(workers: Cluster, owner: str) -> None:
    workers.run(0, _as_context_manager, owner)


def _references_as_arguments() -> None:
    thing = rpc.remote("worker1", g.Thing, args=("arguments",))
    third = rpc.remote("worker2", g.Thing, args=("third",))
    thing.rpc_sync().set_inner([third, thing, rpc.RRef(5)])
    assert thing.rpc_sync().inner_says() == ["worker2", "worker1", "worker0"]
    thing.remote().set_inner(third).to_here()
    thing.rpc_async().set_inner(None).wait()


def test_references_as_arguments_of_methods(workers: Cluster) -> None:
    workers.run(0, _references_as_arguments)


def _confirmed_thing(name: str) -> Any:
    rref = rpc.remote("worker1", g.Thing, args=(name,))
    rref._get_future().wait()
    return rref


def _drop_while_a_method_runs() -> Any:
    future = _confirmed_thing("temporary").rpc_async().at_gate("temporary")
    made = _confirmed_thing("temporary").remote().at_gate("temporary")
    rpc.rpc_sync("worker1", g.open_gate, args=("temporary",))
    assert future.wait() == made.to_here() == "temporary"
    # If the delete message is sent too early, it overtakes the call.
    with faults.inject() as plan:
        plan.delay(0.2, types=["PYTHON_CALL", "PYTHON_REMOTE_CALL"])
        assert _confirmed_thing("overtaken").rpc_async().plus(3).wait() == 3
        assert _confirmed_thing("overtaken")._get_type(blocking=False).wait() is g.Thing
        assert _confirmed_thing("overtaken").remote().plus(4).to_here() == 4
    assert plan.counts["delay PYTHON_CALL"] >= 2
    del future, made
    become_empty()
    wait_until(lambda: rpc.rpc_sync("worker1", g.things, args=("overtaken",)) == 0)


def test_a_value_lives_while_its_method_runs(workers: Cluster) -> None:
    workers.run(0, _drop_while_a_method_runs)


def _many_at_once() -> int:
    rref = rpc.remote("worker1", g.Thing, args=("busy",))
    torch.futures.wait_all([rref.rpc_async().plus_locked(1) for _ in range(500)])
    return int(rref.rpc_sync().plus(0))


def test_many_calls_at_once(workers: Cluster) -> None:
    assert workers.run(0, _many_at_once) == 500
