"""Values whose finalisers make calls."""

from __future__ import annotations

import gc
import threading
from typing import Any
from unittest import mock

import pytest

import farprop.rpc as rpc
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import wait_until
from tests.support.workers import Cluster

said: list[Any] = []


def _hear(what: Any) -> None:
    said.append(what)


def _heard() -> list[Any]:
    return list(said)


class Calling:
    """When it is freed, it calls all workers, makes references and drops them."""

    def __init__(self, name: str, inner: Any = None) -> None:
        self.name = name
        self.inner = inner

    def __del__(self) -> None:
        for to in ("worker0", "worker1", "worker2"):
            rref = rpc.remote(to, f.add, args=(1,))
            assert rpc.rpc_sync("worker2", g.to_here, args=(rref,)) == 2
        assert rpc.RRef(5).to_here() == 5
        rpc.rpc_sync("worker0", _hear, args=(self.name,))

    def ping(self) -> str:
        return self.name

    def at_gate(self, gate: str) -> None:
        g.at_gate(gate)

    def make(self, name: str) -> Calling:
        return Calling(name)


def _dropped_elsewhere() -> None:
    rrefs = [rpc.remote("worker1", Calling, args=(f"dropped {i}",)) for i in range(20)]
    assert rrefs[0].rpc_sync().ping() == "dropped 0"
    rrefs.clear()
    wait_until(lambda: len(said) == 20)
    assert sorted(said) == sorted(f"dropped {i}" for i in range(20))


def _dropped_here() -> None:
    rref = rpc.RRef(Calling("mine"))
    rpc.rpc_sync("worker1", g.keep, args=("mine", rref))
    del rref
    rpc.rpc_sync("worker1", g.let_go, args=("mine",))
    wait_until(lambda: said == ["mine"])


def _dropped_before_the_value_is_made() -> None:
    rpc.remote("worker1", _gated_calling, args=("unmade, with a finaliser",))
    rpc.remote("worker0", _gated_calling, args=("unmade, with a finaliser",))
    for to in ("worker1", "worker0"):
        rpc.rpc_sync(to, g.open_gate, args=("unmade, with a finaliser",))
    wait_until(lambda: said == ["unmade, with a finaliser", "unmade, with a finaliser"])


def _gated_calling(gate: str) -> Calling:
    g.at_gate(gate)
    return Calling(gate)


def _kept_alive_only_by_a_call() -> None:
    """The answer to the call frees the value. The thread that reads the answer must not run the finaliser."""
    for owner in ("worker0", "worker1"):
        said.clear()
        rref = rpc.RRef(Calling("kept")) if owner == "worker0" else rpc.remote(owner, Calling, args=("kept",))
        pending = rref.remote().ping()
        del rref
        assert pending.to_here() == "kept"
        del pending
        wait_until(lambda: said == ["kept"])
        said.clear()
        rref = rpc.RRef(Calling("kept")) if owner == "worker0" else rpc.remote(owner, Calling, args=("kept",))
        future = rref.rpc_async().ping()
        del rref
        assert future.wait() == "kept"
        wait_until(lambda: said == ["kept"])


def _read_by_a_caller() -> None:
    """The same while the main thread waits for another answer on the connection, and so reads this one, too."""
    for i in range(5):
        said.clear()
        rref = rpc.RRef(Calling("read"))
        pending = rref.remote().at_gate(f"read {i}")
        del rref
        rpc.rpc_sync("worker0", _open_and_linger, args=(f"read {i}",))
        pending.to_here()


def _open_and_linger(gate: str) -> None:
    g.open_gate(gate)
    wait_until(lambda: said == ["read"])


def _chain() -> None:
    """Each finaliser frees the next value, on another worker."""
    last: Any = None
    for i in range(9):
        last = rpc.remote(f"worker{i % 3}", Calling, args=(i, last))
    del last
    wait_until(lambda: len(said) == 9)
    assert sorted(said) == list(range(9))


def _freed_with_an_answer() -> None:
    """Values that are freed because the caller has timed out, or because the answer can't be decoded."""
    with pytest.raises(TypeError):
        rpc.rpc_sync("worker1", _unpicklable_with, args=("unpicklable",))
    rpc.rpc_sync("worker1", gc.collect)
    wait_until(lambda: said == ["unpicklable"])


def _unpicklable_with(name: str) -> Any:
    return [Calling(name), threading.Lock()]


@pytest.mark.parametrize(
    "body",
    [
        _dropped_elsewhere,
        _dropped_here,
        _dropped_before_the_value_is_made,
        _kept_alive_only_by_a_call,
        _read_by_a_caller,
        _chain,
        _freed_with_an_answer,
    ],
)
def test_a_finaliser_may_make_calls(workers: Cluster, body: Any) -> None:
    workers.run(0, _forget)
    workers.run(0, body)


def _forget() -> None:
    said.clear()


class _Making:
    """Garbage with a cycle. Its finaliser makes references and drops one, wherever the collector runs it."""

    def __init__(self, kept: list[rpc.RRef[int]], failures: list[BaseException]) -> None:
        self.itself = self
        self.other = kept.pop() if kept else None
        self._kept = kept
        self._failures = failures

    def __del__(self) -> None:
        try:
            self.other = None
            self._kept.append(rpc.RRef(1))
        except BaseException as error:
            self._failures.append(error)


def _collect_under_the_lock() -> int:
    """Has the collector run inside of the machine: every step there makes garbage, and collects it."""
    guard = current_agent().references._guard
    made: list[rpc.RRef[int]] = []
    failures: list[BaseException] = []
    locked = guard.locked

    def step(action: Any, *args: Any) -> Any:
        _Making(made, failures)
        gc.collect()
        return action(*args)

    with mock.patch.object(guard, "locked", lambda action, *args: locked(step, action, *args)):
        for _ in range(20):
            mine = rpc.RRef(2)
            rpc.rpc_sync("worker1", repr, args=(mine,))
            made.append(rpc.remote("worker1", f.add, args=(1,)))
    assert not failures, failures
    return len(made)


def test_finaliser_makes_and_drops_references_inside_of_the_machine(workers: Cluster) -> None:
    assert workers.run(0, _collect_under_the_lock)
