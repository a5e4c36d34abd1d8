"""Regression tests for bugs in references, each with the smallest job that shows it."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError
from farprop.protocol.quiescence import Quiescence
from farprop.rpc import api
from farprop.runtime.agent_registry import current_agent
from farprop.testing import faults
from farprop.wire.message import Method
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import become_empty, owned, wait_until
from tests.support.workers import Cluster, cluster, run_workers

_shutdown_began = threading.Event()


def _self_call_is_cut() -> None:
    own = rpc.RRef(g.Thing("cut"))
    for call in (rpc.rpc_sync, lambda *args, **kwargs: rpc.rpc_async(*args, **kwargs).wait()):
        with faults.inject() as plan:
            plan.cut_at("worker0", 1)
            with pytest.raises(ConnectionLostError):
                call("worker0", f.identity, args=(own,))
    assert rpc.rpc_sync("worker0", f.identity, args=(own,)).local_value() is own.local_value()
    del own
    become_empty()
    wait_until(lambda: not g.things("cut"))


def test_a_cut_connection_during_a_call_to_the_own_worker(workers: Cluster) -> None:
    workers.run(0, _self_call_is_cut)


def _inspect_odd_values() -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    odd = {"cycle": cycle, "deep": deep, "dict": {"self": cycle}, "many": [[n] for n in range(3000)]}
    rrefs = {name: rpc.RRef(value) for name, value in odd.items()}
    rpc.rpc_sync("worker1", g.keep, args=("odd", rrefs))
    found = [reference for reference in rpc.live_references() if reference.role == "owner"]
    assert len(found) == len(odd)
    assert all(reference.nbytes > 0 and reference.holders == ("worker1",) for reference in found)
    rpc.rpc_sync("worker1", g.let_go, args=("odd",))


@pytest.mark.one_transport
def test_live_references_to_recursive_and_deep_values(workers: Cluster) -> None:
    workers.run(0, _inspect_odd_values)


def _pass_on_while_the_owner_is_busy(threads: int) -> None:
    rref = rpc.remote("worker1", g.Thing, args=("of a busy worker",))
    rref._get_future().wait()
    busy = [rpc.rpc_async("worker1", g.at_gate, args=("busy",)) for _ in range(threads)]
    # The callee registers the reference with the owner before it runs the function.
    assert rpc.rpc_sync("worker2", g.keep, args=("passed", rref), timeout=10) is None
    assert not any(call.done() for call in busy)
    g.kept["busy"] = busy


def _end_busy() -> None:
    for call in g.kept.pop("busy"):
        call.wait()


def test_busy_threads_do_not_delay_the_reference_protocol(env: dict[str, str]) -> None:
    with cluster(3, env, {"num_worker_threads": 2}) as c:
        c.run(0, _pass_on_while_the_owner_is_busy, 2)
        assert c.run(2, g.kept_state, "passed") == "CONFIRMED"
        c.run(1, g.open_gate, "busy")
        c.run(0, _end_busy)
        c.run(2, g.kept.clear)


def _has_begun_shutdown() -> bool:
    return _shutdown_began.is_set()


def _use_reference_of_worker2() -> Any:
    """Wait until worker2, which has no work, is in its shutdown; then use the reference that it keeps."""
    wait_until(lambda: rpc.rpc_sync("worker2", _has_begun_shutdown))
    return rpc.rpc_sync("worker2", g.kept_value, args=("late",))


def _shut_down_with_work_on_other_workers(rank: int) -> list[Any]:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=3)
    outcome: list[Any] = []
    if rank == 0:
        rpc.rpc_sync("worker2", g.keep, args=("late", rpc.RRef("value")))
        call = rpc.rpc_async("worker1", _use_reference_of_worker2)
        call.add_done_callback(lambda done: outcome.append(done.value()))
    rounds = Quiescence.round
    drop = api._delete_all_user_and_unforked_owner_rrefs

    def recorded_round(self: Quiescence, reports: Any) -> bool:
        _shutdown_began.set()
        return rounds(self, reports)

    def recorded_drop() -> None:
        _shutdown_began.set()
        drop()

    with (
        mock.patch.object(Quiescence, "round", recorded_round),
        mock.patch.object(api, "_delete_all_user_and_unforked_owner_rrefs", recorded_drop),
    ):
        rpc.shutdown()
    return [str(each) for each in outcome]


@pytest.mark.one_transport
def test_shutdown_waits_for_work_that_uses_references_of_others(transport: str) -> None:
    results = run_workers(_shut_down_with_work_on_other_workers, 3, env={"FARPROP_TRANSPORT": transport})
    assert results == [["value"], [], []]


def _keep_references_and_stop() -> None:
    g.kept["own"] = rpc.RRef("first own")
    g.kept["user"] = rpc.remote("worker1", f.identity, args=("first made",))
    assert g.kept["user"].to_here() == "first made"
    rpc.shutdown(graceful=False)


def _stop() -> None:
    rpc.shutdown(graceful=False)


def _start_again(rank: int) -> None:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)


def _use_references_of_the_earlier_init() -> None:
    own, user = g.kept.pop("own"), g.kept.pop("user")
    new_own = rpc.RRef("second own")
    new_user = rpc.remote("worker1", f.identity, args=("second made",))
    assert new_user.to_here() == "second made"
    rpc.rpc_sync("worker1", g.keep, args=("new", new_own))
    # The ids start again, so the old references have the ids of the new ones.
    assert {str(own), str(user).partition(",")[0]} == {str(new_own), str(new_user).partition(",")[0]}
    for use in (user.to_here, user.rpc_sync().upper, user.rpc_async().upper, user.remote().upper, user._get_type):
        with pytest.raises(UsageError, match="earlier init_rpc"):
            use()
    for rref in (own, user):
        for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            with pytest.raises(UsageError, match="earlier init_rpc"):
                call("worker1", f.identity, args=([rref],))
    assert own.local_value() == "first own"
    assert rpc.rpc_sync("worker1", g.kept_value, args=("new",)) == "second own"
    rpc.rpc_sync("worker1", g.let_go, args=("new",))
    del own, user, new_own, new_user
    become_empty()


def test_a_reference_of_an_earlier_init_can_not_be_used(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _keep_references_and_stop)
        c.run(1, _stop)
        starts = [c.start(rank, _start_again, rank) for rank in range(2)]
        for start in starts:
            start.result()
        c.run(0, _use_references_of_the_earlier_init)


def _fetch_after_drop() -> None:
    """A fetch times out and its reference is dropped; the owner sees the fetch after the drop."""
    rref = rpc.remote("worker1", f.identity, args=(1,))
    assert rref.to_here() == 1
    name = rref._record.rref
    del rref
    wait_until(lambda: rpc.rpc_sync("worker1", owned) == 0)
    with pytest.raises(ReferenceLostError):
        current_agent().call_sync("worker1", Method.FETCH, (name.created_on, name.local_id, False), {}, 20.0)


def test_a_fetch_that_the_owner_sees_after_the_drop(workers: Cluster) -> None:
    workers.run(0, _fetch_after_drop)
