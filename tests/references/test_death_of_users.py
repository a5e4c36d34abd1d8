"""Users of a value die: their references are released, and their unfinished operations are resolved."""

from __future__ import annotations

from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, ReferenceLostError
from farprop.testing import faults
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import all_empty, counts, owned, wait_until
from tests.support.workers import cluster


def _give_references_to(to: str) -> None:
    """The worker ``to`` gets references from the owner, from a user and in a result, and makes some itself."""
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


def test_values_are_freed_when_their_user_dies(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(1, _give_references_to, "worker2")
        wait_until(lambda: c.run(1, g.things, "given") == 4)
        c.kill(2)
        wait_until(lambda: c.run(1, g.things, "given") == 0)
        c.run(1, g.open_gate, "unmade")
        wait_until(lambda: "given" in c.run(1, g.noted))
        wait_until(lambda: c.run(1, g.things, "given") == 0)
        all_empty(c, (0, 1))


def _block_messages(kind: str) -> None:
    """From now on, this worker sends no messages of this kind."""
    plan = faults.FaultPlan()
    if kind.startswith("RREF"):
        plan.fail(types=[kind])  # it is retried
    else:
        plan.lose(types=[kind])
    rpc._get_current_rpc_agent().peers.set_fault_policy(plan.decide)


def _pass_on_and_drop() -> None:
    rref = rpc.remote("worker1", g.Thing, args=("in between",))
    rref.rpc_sync().plus(1)
    g.kept["future"] = rpc.rpc_async("worker2", f.identity, args=(rref,))


def _pass_on_has_failed() -> None:
    with pytest.raises(ConnectionLostError):
        g.kept.pop("future").wait()


def test_a_worker_dies_between_receiving_and_registering(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(2, _block_messages, "RREF_FORK_REQUEST")
        c.run(0, _pass_on_and_drop)
        wait_until(lambda: c.run(2, counts)["num_pending_users"] == 1)
        # Worker 0 has dropped the reference, and keeps its fork alive for worker 2.
        assert c.run(0, counts)["num_pending_forks"] == 1
        assert c.run(1, g.things, "in between") == 1
        c.kill(2)
        wait_until(lambda: c.run(1, g.things, "in between") == 0)
        c.run(0, _pass_on_has_failed)
        all_empty(c, (0, 1))


def test_a_worker_dies_just_after_the_owner_has_listed_its_fork() -> None:
    with cluster(2) as c:
        c.run(1, _block_messages, "RREF_CHILD_ACCEPT")
        c.run(0, _give_own_reference)
        assert c.run(0, counts)["num_pending_forks"] == 1
        c.kill(1)
        wait_until(lambda: c.run(0, owned) == 0)
        all_empty(c, (0,))


def _give_own_reference() -> None:
    rpc.rpc_sync("worker1", g.keep, args=("accepted", rpc.RRef(5)))


def _create_and_pass(name: str) -> None:
    rref = rpc.remote("worker1", g.at_gate, args=("creator", name))
    rpc.rpc_sync("worker2", g.keep, args=("pending", rref))


def test_a_pending_value_is_made_although_its_creator_dies(env: dict[str, str]) -> None:
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


def _create_with_a_lost_call() -> None:
    _block_messages("PYTHON_REMOTE_CALL")
    _create_and_pass("never made")


def _value_is_never_made() -> str:
    with pytest.raises(ReferenceLostError, match="worker0") as caught:
        g.kept["pending"].to_here()
    with pytest.raises(ReferenceLostError, match="worker0"):
        g.kept["pending"].rpc_sync().anything()
    return str(caught.value)


def test_the_creator_dies_before_its_call_has_arrived() -> None:
    with cluster(3) as c:
        c.run(0, _create_with_a_lost_call)
        waiting = c.start(2, _value_is_never_made)
        assert not waiting.done()
        c.kill(0)
        assert "never made on worker1" in waiting.result()
        c.run(2, _value_is_never_made)  # and again
        c.run(2, g.let_go, "pending")
        all_empty(c, (1, 2))


def _orphan_is_void() -> str:
    wait_until(lambda: "orphan" in g.kept)
    wait_until(lambda: g.kept_state("orphan") == "VOID")
    with pytest.raises(ReferenceLostError, match="worker1 does not have the value any more") as caught:
        g.kept["orphan"].to_here()
    return str(caught.value)


def _pass_on_the_last_fork() -> None:
    rref = rpc.remote("worker1", f.add, args=(1,))
    assert rref.to_here() == 2
    g.kept["future"] = rpc.rpc_async("worker2", g.keep, args=("orphan", rref))


def test_the_only_holder_dies_while_it_passes_the_reference_on() -> None:
    """The weak point of the protocol: the receiver's reference is void, and says why."""
    with cluster(3) as c:
        c.run(2, _block_messages, "RREF_FORK_REQUEST")
        c.run(0, _pass_on_the_last_fork)
        wait_until(lambda: c.run(2, counts)["num_pending_users"] == 1)
        c.kill(0)
        wait_until(lambda: c.run(1, owned) == 0)
        c.run(2, _unblock_messages)
        assert "died" in c.run(2, _orphan_is_void)
        c.run(2, g.let_go, "orphan")
        all_empty(c, (1, 2))


def _unblock_messages() -> None:
    rpc._get_current_rpc_agent().peers.set_fault_policy(None)
