"""Workers that die, and workers that only seem to."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, ReferenceLostError, RpcTimeoutError
from farprop.testing import faults
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import all_empty, become_empty, counts, owned, wait_until
from tests.support.workers import cluster


def _keep_some(owner: str, other: str) -> None:
    g.kept["value"] = rpc.remote(owner, g.Thing, args=("kept",))
    g.kept["number"] = rpc.remote(owner, f.add, args=(1,))
    assert g.kept["number"].to_here() == 2
    g.kept["pending"] = rpc.remote(owner, g.at_gate, args=("never",))
    rpc.rpc_sync(other, g.keep, args=("passed", g.kept["number"]))


def _wait_for_pending() -> tuple[list[str], float]:
    """Four threads wait for what a dead worker does not do any more."""
    rref = g.kept["pending"]
    errors: dict[Any, BaseException] = {}

    def wait(use: Any) -> None:
        try:
            use()
        except BaseException as error:
            errors[use] = error

    uses = [rref.to_here, rref.rpc_sync().anything, lambda: rref.rpc_async().anything().wait(), rref._get_type]
    threads = [threading.Thread(target=wait, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    wait_until(lambda: int(rpc._get_debug_info()["agent.client_active_calls"]) >= 5)
    g.kept["waiting"] = True
    began = time.monotonic()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, ConnectionLostError) for error in errors.values())
    return [type(errors[use]).__name__ for use in uses[:2]], time.monotonic() - began


def _is_waiting() -> bool:
    return bool(g.kept.get("waiting"))


def _every_use_raises(*keys: str) -> None:
    for key in keys:
        rref = g.kept[key]
        wait_until(lambda: g.kept_state(key) == "VOID")  # noqa: B023
        began = time.monotonic()
        for use in (
            rref.to_here,
            rref.rpc_sync().plus,
            rref.rpc_async().plus,
            rref.remote().plus,
            rref._get_type,
            lambda: rpc.rpc_sync("worker0", f.identity, args=(rref,)),  # noqa: B023
            lambda: rpc.rpc_async("worker2", f.identity, args=([rref],)),  # noqa: B023
            lambda: rpc.remote("worker2", f.identity, args=([rref],)),  # noqa: B023
        ):
            with pytest.raises(ReferenceLostError, match="worker1"):
                use()
        assert time.monotonic() - began < 5
        assert rref.owner_name() == "worker1"
        assert not rref.is_owner()
        assert not rref.confirmed_by_owner()
        assert repr(rref).endswith("void>")
    assert rpc.rpc_sync("worker0", f.add, args=(1,)) == 2  # the living go on


def _use_at_once() -> float:
    """Before anybody had time to find out."""
    began = time.monotonic()
    with pytest.raises(ReferenceLostError, match="worker1"):
        g.kept["number"].to_here()
    with pytest.raises(ReferenceLostError, match="worker1"):
        g.kept["value"].rpc_sync().plus(1)
    with pytest.raises(ConnectionLostError):
        rpc.remote("worker1", f.noop)
    return time.monotonic() - began


def _drop_all() -> None:
    g.kept.clear()
    become_empty()


def test_the_owner_dies(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _keep_some, "worker1", "worker2")
        waiting = c.start(0, _wait_for_pending)
        wait_until(lambda: c.run(0, _is_waiting))
        c.kill(1)
        assert c.run(0, _use_at_once) < 10
        names, seconds = waiting.result()
        assert names == ["ReferenceLostError", "ReferenceLostError"]
        assert seconds < 10
        c.run(0, _every_use_raises, "value", "number", "pending")
        c.run(2, _every_use_raises, "passed")
        for rank in (0, 2):
            c.run(rank, _drop_all)


def test_the_first_use_after_a_death_through_a_proxy(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _keep_one)
        c.kill(1)
        c.run(0, _first_use_through_a_proxy)


def _keep_one() -> None:
    g.kept["value"] = rpc.remote("worker1", g.Thing)
    assert g.kept["value"].rpc_sync().plus(1) == 1


def _first_use_through_a_proxy() -> None:
    with pytest.raises(ReferenceLostError, match="worker1"):
        g.kept["value"].rpc_sync().plus(1)
    _drop_all()


def _give_to(to: str) -> None:
    """References from the owner, from a user, in a result, and those that the other makes itself."""
    rpc.rpc_sync(to, g.keep, args=("from the owner", rpc.RRef(g.Thing("given"))))
    rpc.rpc_sync("worker0", _pass_on, args=(rpc.RRef(g.Thing("given")), to))
    rpc.rpc_sync(to, _fetch, args=("worker1",))
    rpc.rpc_sync(to, _make, args=("worker1",))


def _pass_on(rref: Any, to: str) -> None:
    rpc.rpc_sync(to, g.keep, args=("from a user", rref))


def _fetch(owner: str) -> None:
    g.kept["in a result"] = rpc.rpc_sync(owner, g.own, args=("given",))


def _make(owner: str) -> None:
    g.kept["made"] = rpc.remote(owner, g.Thing, args=("given",))
    g.kept["unmade"] = rpc.remote(owner, g.gated_thing, args=("unmade", "given"))


def test_a_user_dies(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(1, _give_to, "worker2")
        wait_until(lambda: c.run(1, g.things, "given") == 4)
        c.kill(2)
        wait_until(lambda: c.run(1, g.things, "given") == 0)
        c.run(1, g.open_gate, "unmade")
        wait_until(lambda: "given" in c.run(1, g.noted))
        wait_until(lambda: c.run(1, g.things, "given") == 0)
        all_empty(c, (0, 1))


def _hold_back(*types: str) -> None:
    """These messages of this worker are not sent, for now."""
    plan = faults.FaultPlan()
    plan.lose(types=types)
    rpc._get_current_rpc_agent().set_judge(plan.judge)


def _pass_and_drop() -> None:
    rref = rpc.remote("worker1", g.Thing, args=("in between",))
    rref.rpc_sync().plus(1)
    g.kept["future"] = rpc.rpc_async("worker2", f.identity, args=(rref,))


def _in_between_failed() -> None:
    with pytest.raises(ConnectionLostError):
        g.kept.pop("future").wait()


def test_a_worker_dies_between_receiving_and_registering(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(2, _hold_back, "RREF_FORK_REQUEST")
        c.run(0, _pass_and_drop)
        wait_until(lambda: c.run(2, counts)["num_pending_users"] == 1)
        # Worker 0 has dropped it, and holds it for worker 2.
        assert c.run(0, counts)["num_pending_forks"] == 1
        assert c.run(1, g.things, "in between") == 1
        c.kill(2)
        wait_until(lambda: c.run(1, g.things, "in between") == 0)
        c.run(0, _in_between_failed)
        all_empty(c, (0, 1))


def test_a_worker_dies_that_the_owner_has_just_counted() -> None:
    with cluster(2) as c:
        c.run(1, _hold_back, "RREF_CHILD_ACCEPT")
        c.run(0, rpc.rpc_sync, "worker1", g.keep, ("accepted", 1))
        c.run(0, _give_own)
        assert c.run(0, counts)["num_pending_forks"] == 1
        c.kill(1)
        wait_until(lambda: c.run(0, owned) == 0)
        all_empty(c, (0,))


def _give_own() -> None:
    rpc.rpc_sync("worker1", g.keep, args=("accepted", rpc.RRef(5)))


def _create_and_pass(name: str) -> None:
    rref = rpc.remote("worker1", g.at_gate, args=("creator", name))
    rpc.rpc_sync("worker2", g.keep, args=("pending", rref))


def test_the_creator_of_a_pending_value_dies(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _create_and_pass, "made all the same")
        waiting = c.start(2, g.kept_value, "pending")
        c.kill(0)
        wait_until(lambda: c.run(1, counts)["num_forks"] == 1)
        assert not waiting.done()
        c.run(1, g.open_gate, "creator")
        assert waiting.result() == "made all the same"
        c.run(2, g.let_go, "pending")
        all_empty(c, (1, 2))


def _create_late_and_pass() -> None:
    _hold_back("PYTHON_REMOTE_CALL")
    _create_and_pass("never made")


def _never_made() -> str:
    with pytest.raises(ReferenceLostError, match="worker0") as caught:
        g.kept["pending"].to_here()
    with pytest.raises(ReferenceLostError, match="worker0"):
        g.kept["pending"].rpc_sync().anything()
    return str(caught.value)


def test_the_creator_dies_before_its_call_has_come() -> None:
    with cluster(3) as c:
        c.run(0, _create_late_and_pass)
        waiting = c.start(2, _never_made)
        assert not waiting.done()
        c.kill(0)
        assert "never made on worker1" in waiting.result()
        c.run(2, _never_made)  # and again
        c.run(2, g.let_go, "pending")
        all_empty(c, (1, 2))


def _lost_parent() -> str:
    wait_until(lambda: "orphan" in g.kept)
    wait_until(lambda: g.kept_state("orphan") == "VOID")
    with pytest.raises(ReferenceLostError, match="worker1 does not have the value any more") as caught:
        g.kept["orphan"].to_here()
    return str(caught.value)


def _pass_an_orphan() -> None:
    rref = rpc.remote("worker1", f.add, args=(1,))
    assert rref.to_here() == 2
    g.kept["future"] = rpc.rpc_async("worker2", g.keep, args=("orphan", rref))


def test_the_only_holder_dies_while_it_passes_the_reference_on() -> None:
    """The weak point of the protocol: the receiver's reference is void, and says why."""
    with cluster(3) as c:
        c.run(2, _hold_back, "RREF_FORK_REQUEST")
        c.run(0, _pass_an_orphan)
        wait_until(lambda: c.run(2, counts)["num_pending_users"] == 1)
        c.kill(0)
        wait_until(lambda: c.run(1, owned) == 0)
        c.run(2, _let_through)
        assert "died" in c.run(2, _lost_parent)
        c.run(2, g.let_go, "orphan")
        all_empty(c, (1, 2))


def _let_through() -> None:
    rpc._get_current_rpc_agent().set_judge(None)


def _use_while_stopped() -> None:
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        g.kept["number"].to_here(timeout=0.3)
    with pytest.raises(RpcTimeoutError):
        g.kept["value"].rpc_sync(timeout=0.3).plus(1)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker2", f.identity, args=(g.kept["number"],), timeout=0.3)  # its owner does not count it
    assert 0.9 <= time.monotonic() - began < 10
    for key in ("value", "number"):
        assert g.kept_state(key) == "CONFIRMED"


def _use_after_that() -> None:
    assert g.kept["number"].to_here() == 2
    assert g.kept["value"].rpc_sync().plus(1) in (1, 2)  # the one that timed out has run as well, or was too late
    assert rpc.rpc_sync("worker2", g.to_here, args=(g.kept["number"],)) == 2
    rpc.rpc_sync("worker1", g.open_gate, args=("never",))


def test_a_stopped_worker_is_not_dead(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _keep_some, "worker1", "worker2")
        c.signal(1, signal.SIGSTOP)
        c.run(0, _use_while_stopped)
        c.signal(1, signal.SIGCONT)
        c.run(0, _use_after_that)
        c.run(0, g.kept.clear)
        for rank in (0, 2):
            c.run(rank, _drop_all)
        all_empty(c)


def _cut_and_use() -> float:
    with faults.inject() as plan:
        plan.cut_at("worker1", 1)
        began = time.monotonic()
        with pytest.raises(RpcTimeoutError):
            g.kept["number"].to_here(timeout=0.5)
        plan.cut_at("worker1", 1)
        with pytest.raises((RpcTimeoutError, ConnectionLostError)):
            g.kept["value"].rpc_sync(timeout=0.5).plus(1)
        return time.monotonic() - began


def test_finding_out_whether_a_stopped_owner_lives_does_not_outlast_the_deadline(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _keep_some, "worker1", "worker2")
        c.signal(1, signal.SIGSTOP)
        assert c.run(0, _cut_and_use) < 8
        c.signal(1, signal.SIGCONT)
        c.run(0, _use_after_that)
        for rank in (0, 2):
            c.run(rank, _drop_all)
        all_empty(c)


def _shutdown_error() -> tuple[str, float]:
    began = time.monotonic()
    try:
        rpc.shutdown()
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "no error", time.monotonic() - began


def test_graceful_shutdown_of_the_survivors_is_bounded(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _keep_some, "worker1", "worker2")
        c.run(1, _give_to, "worker2")
        c.kill(1)
        ends = [c.start(rank, _shutdown_error).result(30) for rank in (0, 2)]
    assert any("worker1" in text for text, _ in ends)
    assert all(seconds < 20 for _, seconds in ends)
