"""Exceptions at the caller: their types, texts, notes and remote tracebacks."""

from __future__ import annotations

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RemoteError, RpcTimeoutError, UsageError
from tests.calls import functions as f
from tests.support.workers import cluster


def _types_are_kept() -> None:
    with pytest.raises(ValueError, match="some text") as caught:
        rpc.rpc_sync("worker1", f.raise_value_error, args=("some text",))
    assert str(caught.value) == "some text"
    note = "\n".join(caught.value.__notes__)
    assert "worker1" in note
    assert "raise_value_error" in note
    assert "functions.py" in note
    with pytest.raises(torch.jit.Error, match="in script") as scripted:
        rpc.rpc_sync("worker1", f.scripted_failure, args=("in script",))
    assert isinstance(scripted.value, RuntimeError)  # as over torch's RPC; a local call raises another type
    with pytest.raises(f.Custom) as custom:
        rpc.rpc_sync("worker1", f.raise_custom)
    assert (custom.value.code, custom.value.text) == (7, "seven")
    assert custom.value.extra == [1, 2]  # type: ignore[attr-defined]
    future = rpc.rpc_async("worker1", f.raise_custom)
    for _ in range(2):
        with pytest.raises(f.Custom):
            future.wait()


def _not_rebuildable() -> None:
    with pytest.raises(RemoteError, match="Stubborn") as caught:
        rpc.rpc_sync("worker1", f.raise_stubborn)
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert error.worker == "worker1"
    assert error.type_name == "tests.calls.functions.Stubborn"
    assert "raise_stubborn" in error.remote_traceback
    assert "Original exception on remote side was Stubborn('eight')" in str(error)
    with pytest.raises(RemoteError, match="holds a lock"):
        rpc.rpc_sync("worker1", f.raise_unpicklable)
    # SystemExit on the callee is an error for the caller, and the callee lives.
    with pytest.raises(RemoteError, match="SystemExit"):
        rpc.rpc_sync("worker1", f.raise_exit)
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2


def _through_two_hops() -> None:
    with pytest.raises(ValueError, match="two hops away") as caught:
        rpc.rpc_sync("worker1", f.raise_from, args=("worker2",))
    note = "\n".join(caught.value.__notes__)
    assert "worker1" in note
    assert "worker2" in note


def _values_that_fail_to_pickle() -> None:
    with pytest.raises(TypeError, match="cannot pickle '_thread.lock' object") as caught:
        rpc.rpc_sync("worker1", f.unpicklable_result)
    assert "could not encode the function's result" in "\n".join(caught.value.__notes__)
    with pytest.raises(TypeError, match="cannot pickle"):
        rpc.rpc_sync("worker1", f.identity, args=(__import__("threading").Lock(),))
    with pytest.raises(ZeroDivisionError) as caught_too:
        rpc.rpc_sync("worker1", f.identity, args=(Grenade(),))
    assert "could not decode the call's arguments" in "\n".join(caught_too.value.__notes__)
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2


def _explode() -> None:
    raise ZeroDivisionError


class Grenade:
    """Raises when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return _explode, ()


def test_exceptions(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _types_are_kept)
        c.run(0, _not_rebuildable)
        c.run(0, _through_two_hops)
        c.run(0, _values_that_fail_to_pickle)


def test_the_four_kinds_of_errors_are_distinct_runtime_errors() -> None:
    kinds = [RemoteError, RpcTimeoutError, ConnectionLostError, UsageError]
    for kind in kinds:
        assert issubclass(kind, RuntimeError)
        assert not any(issubclass(kind, other) for other in kinds if other is not kind)
    assert issubclass(RpcTimeoutError, TimeoutError)
    assert issubclass(ConnectionLostError, ConnectionError)


def _peer_dies_during_call() -> None:
    future = rpc.rpc_async("worker1", f.wait_for_gate)
    with pytest.raises(ConnectionLostError, match="worker1"):
        rpc.rpc_sync("worker1", f.die)
    with pytest.raises(ConnectionLostError, match="worker1"):
        future.wait()
    with pytest.raises(ConnectionLostError, match="Can't reach worker1"):
        rpc.rpc_sync("worker1", f.noop)
    with pytest.raises(ConnectionLostError, match="Can't reach worker1"):
        rpc.rpc_async("worker1", f.noop).wait()
    assert rpc.rpc_sync("worker2", f.add, args=(1,)) == 2


def test_a_worker_that_dies_raises_connection_lost_at_once(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _peer_dies_during_call)
        assert c.wait(1) == 9


def _call_the_dying_through_worker1() -> None:
    with pytest.raises(ConnectionLostError, match="worker2"):
        rpc.rpc_sync("worker1", _call_the_dying)
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2


def _call_the_dying() -> None:
    rpc.rpc_sync("worker2", f.die)


def test_a_worker_that_dies_two_hops_away_raises_at_the_caller(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _call_the_dying_through_worker1)
        c.wait(2)
