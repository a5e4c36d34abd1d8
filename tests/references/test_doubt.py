"""Calls with unknown outcomes: timeouts and cut connections. Nothing leaks, and nothing runs twice."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, InjectedFaultError, ReferenceLostError, RpcTimeoutError
from farprop.testing import faults
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import all_empty, become_empty, owned, wait_until
from tests.support.workers import Cluster, cluster

executions: Counter[str] = Counter()


def _timed_out_reference(owner: str, gate: str) -> Any:
    """A reference whose ``remote()`` has timed out; the function waits at the gate."""
    rref = rpc.remote(owner, g.gated_thing, args=(gate, gate), timeout=0.1)
    with pytest.raises(RpcTimeoutError, match="set timeout"):
        rref._get_future().wait()
    return rref


def _every_use_raises(rref: Any) -> None:
    for use in (
        rref.to_here,
        lambda: rref.to_here(timeout=1),
        rref.rpc_sync().plus,
        lambda: rref.rpc_async().plus(1).wait(),
        lambda: rref.remote().plus(1).to_here(),
        rref._get_type,
        lambda: rpc.rpc_sync("worker1", f.identity, args=(rref,)),
        lambda: rpc.rpc_async("worker2", f.identity, args=([rref],)),
        lambda: rpc.remote("worker2", f.identity, args=([rref],)),
        lambda: rpc.rpc_sync("worker0", f.identity, args=(rref,)),
    ):
        with pytest.raises(RpcTimeoutError, match="RRef creation"):
            use()


def _used_after_the_timeout(owner: str) -> None:
    gate = f"late at {owner}"
    rref = _timed_out_reference(owner, gate)
    _every_use_raises(rref)
    rpc.rpc_sync(owner, g.open_gate, args=(gate,))
    wait_until(lambda: gate in rpc.rpc_sync(owner, g.noted))
    _every_use_raises(rref)  # even though the value exists now
    assert not rref.confirmed_by_owner() or rref.is_owner()
    del rref
    wait_until(lambda: rpc.rpc_sync(owner, g.things, args=(gate,)) == 0)


def _dropped_before_the_value_is_made(owner: str) -> None:
    gate = f"dropped at {owner}"
    _timed_out_reference(owner, gate)
    wait_until(lambda: rpc.rpc_sync(owner, owned) == 0)
    rpc.rpc_sync(owner, g.open_gate, args=(gate,))
    wait_until(lambda: gate in rpc.rpc_sync(owner, g.noted))
    wait_until(lambda: rpc.rpc_sync(owner, g.things, args=(gate,)) == 0)


def _passed_on_before_the_timeout(owner: str) -> None:
    """A worker that got the reference before the timeout can use it."""
    gate = f"passed at {owner}"
    rref = rpc.remote(owner, g.gated_thing, args=(gate, gate), timeout=0.5)
    rpc.rpc_sync("worker2", g.keep, args=("in time", rref))
    with pytest.raises(RpcTimeoutError):
        rref._get_future().wait()
    del rref
    rpc.rpc_sync(owner, g.open_gate, args=(gate,))
    assert rpc.rpc_sync("worker2", _plus_kept) == 1
    rpc.rpc_sync("worker2", g.let_go, args=("in time",))
    wait_until(lambda: rpc.rpc_sync(owner, g.things, args=(gate,)) == 0)


def _plus_kept() -> Any:
    return g.kept["in time"].rpc_sync().plus(1)


@pytest.mark.parametrize("owner", ["worker1", "worker0"])
@pytest.mark.parametrize("body", [_used_after_the_timeout, _dropped_before_the_value_is_made])
def test_remote_that_times_out(workers: Cluster, body: Any, owner: str) -> None:
    workers.run(0, body, owner)


def test_a_reference_that_was_passed_on_before_the_timeout_can_be_used(workers: Cluster) -> None:
    workers.run(0, _passed_on_before_the_timeout, "worker1")


def _fail_beside_another_reference() -> None:
    other = rpc.remote("worker2", g.Thing, args=("beside",))
    assert other.rpc_sync().plus(1) == 1
    with faults.inject() as plan:
        plan.fail(types=["PYTHON_REMOTE_CALL"])
        g.kept["failed"] = rpc.remote("worker1", f.noop)
    for use in (g.kept["failed"].to_here, g.kept["failed"]._get_type):
        with pytest.raises(InjectedFaultError):
            use()


def _only_the_error_is_kept() -> None:
    _fail_beside_another_reference()
    gc.collect()
    wait_until(lambda: rpc.rpc_sync("worker2", g.things, args=("beside",)) == 0)
    with pytest.raises(InjectedFaultError, match="RRef creation"):
        g.kept.pop("failed").to_here()


def test_a_failed_reference_keeps_its_error_but_no_frames(workers: Cluster) -> None:
    workers.run(0, _only_the_error_is_kept)


def _return_references_at_gate(gate: str, *given: Any) -> Any:
    g.at_gate(gate)
    return [g.own(gate), *given]


def _time_out() -> None:
    thing = rpc.RRef(g.Thing("argument"))
    third = rpc.remote("worker2", g.Thing, args=("argument",))
    for give in (
        lambda: rpc.rpc_sync("worker1", _return_references_at_gate, args=("late answer", thing, third), timeout=0.1),
        lambda: rpc.rpc_async(
            "worker1", _return_references_at_gate, args=("late answer", thing, third), timeout=0.1
        ).wait(),
    ):
        with pytest.raises(RpcTimeoutError):
            give()


def _late_answer() -> None:
    """References in the answer to an abandoned call, and in the arguments of one."""
    _time_out()
    gc.collect()
    # The functions still run, and have their arguments.
    assert g.things("argument") == rpc.rpc_sync("worker2", g.things, args=("argument",)) == 1
    rpc.rpc_sync("worker1", g.open_gate, args=("late answer",))
    for worker, name in (("worker0", "argument"), ("worker2", "argument"), ("worker1", "late answer")):
        wait_until(lambda: rpc.rpc_sync(worker, g.things, args=(name,)) == 0)  # noqa: B023


def test_references_in_a_late_answer_are_released(workers: Cluster) -> None:
    workers.run(0, _late_answer)


def _lost_answer() -> None:
    """The connection is cut while the function runs, so its answer can't be sent."""
    thing = rpc.RRef(g.Thing("argument"))
    future = rpc.rpc_async("worker1", _return_references_at_gate, args=("lost answer", thing))
    made = rpc.remote("worker1", _return_references_at_gate, args=("lost answer", thing))
    wait_until(lambda: owned() == 1)
    with faults.inject() as plan:
        plan.cut_at("worker1", 1)
        with pytest.raises(ConnectionLostError):
            rpc.rpc_sync("worker1", f.noop)
        assert plan.counts == {"cut PYTHON_CALL": 1}
    with pytest.raises(ConnectionLostError):
        future.wait()
    with pytest.raises(ConnectionLostError):
        made._get_future().wait()
    with pytest.raises(ReferenceLostError, match="RRef creation"):
        made.to_here()
    rpc.rpc_sync("worker1", g.open_gate, args=("lost answer",))
    del thing, future, made
    become_empty()
    wait_until(lambda: rpc.rpc_sync("worker1", g.things, args=("lost answer",)) == 0)


def test_references_in_a_lost_answer_are_released(workers: Cluster) -> None:
    workers.run(0, _lost_answer)


def _count(key: str, rrefs: list[Any]) -> list[Any]:
    executions[key] += 1
    return rrefs


def _executions() -> Counter[str]:
    return executions


def _call_over_a_breaking_connection(rank: int, seed: int) -> tuple[list[str], int, int]:
    """Make calls with references over a connection that breaks now and then.

    Returns the keys of the calls that worked, the number of those that failed, and the number of cuts.
    """
    dice = random.Random(seed)
    to = f"worker{(rank + 1) % 3}"
    rrefs = [rpc.RRef(rank), *(rpc.remote(f"worker{i}", f.identity, args=(i,)) for i in range(3))]
    for rref in rrefs[1:]:
        rref._get_future().wait()
    worked, failed, cuts = [], 0, 0
    for i in range(25):
        with faults.inject() as plan:
            plan.cut_at(to, dice.randint(1, 12))
            calls: dict[str, Any] = {}
            for j in range(8):
                key = f"{rank}.{seed}.{i}.{j}"
                try:
                    call = rpc.remote if j % 2 else rpc.rpc_async
                    calls[key] = call(to, _count, args=(key, rrefs))  # type: ignore[operator]
                except ConnectionLostError:
                    failed += 1
            for key, outcome in calls.items():
                try:
                    values = outcome.to_here() if isinstance(outcome, rpc.RRef) else outcome.wait()
                    assert [rref.to_here() for rref in values] == [rank, 0, 1, 2]
                    worked.append(key)
                except ConnectionLostError:
                    failed += 1
        cuts += plan.counts.total()
    return worked, failed, cuts


def test_cut_connections_with_references_in_flight(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        handles = [c.start(rank, _call_over_a_breaking_connection, rank, seed=rank + 5) for rank in range(3)]
        results = [handle.result() for handle in handles]
        ran: Counter[str] = Counter()
        for rank in range(3):
            ran += c.run(rank, _executions)
        assert not [key for key, count in ran.items() if count > 1]
        for worked, failed, cuts in results:
            assert len(worked) + failed == 200
            assert cuts >= 10
            assert failed >= 10
            assert all(ran[key] == 1 for key in worked)
        all_empty(c)
