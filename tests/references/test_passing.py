"""References that are passed on: between owner and users, in every direction, confirmed or not."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch

import farprop.rpc as rpc
from farprop.runtime.references.control_sender import ControlSender
from farprop.runtime.references.rref_context import RRefContext
from farprop.testing import faults
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import all_empty, owned, wait_until
from tests.support.workers import Cluster, cluster


def _give_mine(to: str, name: str) -> None:
    rpc.rpc_sync(to, g.keep, args=(name, rpc.RRef(g.Thing(name))))


def _use_kept(name: str) -> list[Any]:
    rref = g.kept[name]
    return [rref.is_owner(), rref.owner_name(), rref.confirmed_by_owner(), rref.rpc_sync().plus(1)]


def test_passing_from_owner_to_user(workers: Cluster) -> None:
    workers.run(1, _give_mine, "worker0", "from the owner")
    # Only worker0 refers to it now.
    assert workers.run(0, _use_kept, "from the owner") == [False, "worker1", True, 1]
    assert workers.run(1, g.things, "from the owner") == 1
    workers.run(0, g.let_go, "from the owner")
    wait_until(lambda: workers.run(1, g.things, "from the owner") == 0)


def _is_mine(rref: Any) -> tuple[bool, bool, int]:
    return rref.is_owner(), rref.confirmed_by_owner(), id(rref.local_value())


def _pass_to_the_owner() -> None:
    rref = rpc.remote("worker1", g.Thing, args=("to the owner",))
    first = rpc.rpc_sync("worker1", _is_mine, args=(rref,))
    assert first[:2] == (True, True)
    assert rpc.rpc_async("worker1", _is_mine, args=(rref,)).wait() == first  # the very same value
    assert rpc.remote("worker1", _is_mine, args=(rref,)).to_here() == first
    rpc.rpc_sync("worker1", g.keep, args=("to the owner", rref))


def test_passing_from_user_to_owner(workers: Cluster) -> None:
    workers.run(0, _pass_to_the_owner)
    # Only the owner refers to it now.
    wait_until(lambda: workers.run(1, owned) == 0)
    assert workers.run(1, _use_kept, "to the owner") == [True, "worker1", True, 1]
    workers.run(1, g.let_go, "to the owner")
    wait_until(lambda: workers.run(1, g.things, "to the owner") == 0)


def _pass_to_another_user() -> None:
    rref = rpc.remote("worker1", g.Thing, args=("between users",))
    rref._get_future().wait()
    assert rref.confirmed_by_owner()
    rpc.rpc_sync("worker2", g.keep, args=("between users", rref))


def test_passing_from_user_to_user(workers: Cluster) -> None:
    workers.run(0, _pass_to_another_user)
    assert workers.run(2, _use_kept, "between users") == [False, "worker1", True, 1]
    workers.run(2, g.let_go, "between users")
    wait_until(lambda: workers.run(1, g.things, "between users") == 0)


def _pass_before_it_is_made() -> None:
    rref = rpc.remote("worker1", g.at_gate, args=("unmade", "made"))
    rpc.rpc_sync("worker2", g.keep, args=("unmade", rref))
    rpc.rpc_sync("worker1", g.keep, args=("unmade", rref))  # the owner itself
    assert not rref.confirmed_by_owner()
    del rref
    waiting = [rpc.rpc_async(to, g.kept_value, args=("unmade",)) for to in ("worker1", "worker2")]
    assert rpc.rpc_sync("worker2", g.kept_state, args=("unmade",)) == "CONFIRMED"
    assert not any(future.done() for future in waiting)
    rpc.rpc_sync("worker1", g.open_gate, args=("unmade",))
    assert torch.futures.wait_all(waiting) == ["made", "made"]
    for to in ("worker1", "worker2"):
        rpc.rpc_sync(to, g.let_go, args=("unmade",))


def test_passing_on_an_unconfirmed_reference(workers: Cluster) -> None:
    workers.run(0, _pass_before_it_is_made)


def _overtake_the_call() -> None:
    """The reference arrives before the call that makes its value."""
    with faults.inject() as plan:
        plan.delay(0.4, types=["PYTHON_REMOTE_CALL"])
        rref = rpc.remote("worker1", f.add, args=(1, 2))
        assert rpc.rpc_sync("worker2", g.to_here, args=(rref,)) == 3
        again = rpc.remote("worker1", f.add, args=(2, 2))
        assert rpc.rpc_sync("worker1", g.to_here, args=(again,)) == 4
        early = rpc.remote("worker1", f.add, args=(3, 2))
        assert early.to_here() == 5
        dropped = rpc.remote("worker1", f.add, args=(4, 2))
        rpc.rpc_sync("worker2", g.keep, args=("overtaken", dropped))
        del dropped
        assert rpc.rpc_sync("worker2", g.kept_value, args=("overtaken",)) == 6
        rpc.rpc_sync("worker2", g.let_go, args=("overtaken",))
    assert plan.counts == {"delay PYTHON_REMOTE_CALL": 4}


def test_a_reference_that_overtakes_its_call(workers: Cluster) -> None:
    workers.run(0, _overtake_the_call)


def _pass_back_to_the_creator() -> None:
    rref = rpc.remote("worker1", g.Thing, args=("back",))
    back = rpc.rpc_sync("worker2", f.identity, args=(rref,))
    assert back is not rref
    assert str(back).split(",")[0] == str(rref).split(",")[0]  # the same value
    del rref
    assert back.rpc_sync().plus(2) == 2
    assert back.owner_name() == "worker1"
    # an owned reference comes back as the owner's
    thing = g.Thing("ours")
    ours = rpc.rpc_sync("worker2", f.identity, args=(rpc.RRef(thing),))
    assert ours.is_owner()
    assert ours.local_value() is thing


def test_passing_back_to_the_creator(workers: Cluster) -> None:
    workers.run(0, _pass_back_to_the_creator)


def _pass_to_own_worker() -> None:
    thing = g.Thing("to oneself")
    mine = rpc.rpc_sync("worker0", f.identity, args=(rpc.RRef(thing),))
    assert mine.is_owner()
    assert mine.local_value() is thing
    theirs = rpc.remote("worker1", f.add, args=(1,))
    came = rpc.rpc_sync("worker0", f.identity, args=(theirs,))
    del theirs
    assert came.to_here() == 2
    assert rpc.remote("worker0", g.to_here, args=(came,)).to_here() == 2
    unmade = rpc.remote("worker0", g.at_gate, args=("to oneself", 5))
    waiting = rpc.rpc_async("worker0", g.to_here, args=(unmade,))
    g.open_gate("to oneself")
    assert waiting.wait() == 5
    del mine, came, unmade
    wait_until(lambda: owned() == 0)


def test_passing_to_the_own_worker(workers: Cluster) -> None:
    workers.run(0, _pass_to_own_worker)


@rpc.functions.async_execution
def _later(rref: Any) -> torch.futures.Future[Any]:
    return rpc.rpc_async("worker2", f.identity, args=(rref,)).then(lambda done: [done.value(), g.own("later")])


async def _coroutine(rref: Any) -> Any:
    return [rref, g.own("later")]


def _synchronous(rref: Any) -> Any:
    return [rref, g.own("later")]


def _return_references() -> None:
    for owner in ("worker0", "worker1", "worker2"):
        rref = rpc.remote(owner, f.add, args=(1,))
        for function in (_synchronous, _coroutine, _later):
            for came, made in (
                rpc.rpc_sync("worker1", function, args=(rref,)),
                rpc.rpc_async("worker1", function, args=(rref,)).wait(),
                rpc.remote("worker1", function, args=(rref,)).to_here(),
            ):
                assert came.to_here() == 2
                assert came.owner_name() == owner
                assert came.is_owner() == (owner == "worker0")
                assert made.rpc_sync().plus(3) == 3
                assert made.owner_name() == "worker1"


def test_references_in_results(workers: Cluster) -> None:
    workers.run(0, _return_references)


def _hop(rref: Any, path: list[str]) -> Any:
    assert rref.confirmed_by_owner()
    if not path:
        return [rref.to_here(), rref]
    seen = rpc.rpc_sync(path[0], _hop, args=(rref, path[1:]))
    return [*seen[:-1], rref.to_here(), seen[-1]]


def _three_hops() -> None:
    for owner in ("worker0", "worker1", "worker2"):
        rref = rpc.remote(owner, f.add, args=(1,))
        for path in (["worker1", "worker2", "worker0"], ["worker2", "worker1", "worker2"], ["worker0"] * 3):
            *values, back = rpc.rpc_sync(path[0], _hop, args=(rref, path[1:]))
            assert values == [2, 2, 2]
            assert back.to_here() == 2


def test_passing_through_three_hops(workers: Cluster) -> None:
    workers.run(0, _three_hops)


def _states(rrefs: list[Any]) -> list[bool]:
    return [rref.confirmed_by_owner() for rref in rrefs]


def _delay_registering() -> None:
    plan = faults.FaultPlan()
    plan.delay(0.3, types=["RREF_FORK_REQUEST"])
    rpc._get_current_rpc_agent().peers.set_fault_policy(plan.decide)
    g.keep("plan", plan)


def _stop_delaying() -> int:
    rpc._get_current_rpc_agent().peers.set_fault_policy(None)
    return g.kept.pop("plan").counts.total()  # type: ignore[no-any-return]


def _confirmed_at_the_start() -> None:
    rrefs = [rpc.RRef(1), rpc.remote("worker1", f.noop), rpc.remote("worker2", f.noop)]
    assert rpc.rpc_sync("worker2", _states, args=(rrefs,)) == [True, True, True]
    assert rpc.rpc_async("worker2", _states, args=(rrefs,)).wait() == [True, True, True]
    assert rpc.remote("worker2", _states, args=(rrefs,)).to_here() == [True, True, True]
    # A result may be used before it is confirmed.
    rpc.rpc_sync("worker2", g.keep, args=("theirs", rrefs[1]))


def _unconfirmed_result() -> None:
    rref = rpc.rpc_sync("worker0", g.give, args=("unconfirmed",))
    assert not rref.confirmed_by_owner()
    assert rref.to_here() == 5
    assert rref.rpc_sync().__add__(1) == 6
    assert rpc.rpc_sync("worker1", g.to_here, args=(rref,)) == 5
    assert rpc.rpc_sync("worker0", g.to_here, args=(rref,)) == 5


def test_a_called_function_finds_its_references_confirmed() -> None:
    with cluster(3) as c:
        c.run(2, _delay_registering)
        c.run(0, _confirmed_at_the_start)
        assert c.run(2, _stop_delaying) == 1  # of the one that is kept
        c.run(2, g.let_go, "theirs")
        c.run(0, g.keep, "unconfirmed", None)
        c.run(0, _make_unconfirmed)
        c.run(2, _delay_registering)
        c.run(2, _unconfirmed_result)
        assert c.run(2, _stop_delaying) >= 1
        c.run(0, g.let_go, "unconfirmed")
        all_empty(c)


def _make_unconfirmed() -> None:
    g.kept["unconfirmed"] = rpc.remote("worker1", f.identity, args=(5,))


def _storm() -> None:
    """Thousands of forks of the same few values, in all directions at once."""
    rrefs = [rpc.RRef(0), *(rpc.remote(to, f.identity, args=(i,)) for i, to in ((1, "worker1"), (2, "worker2")))]
    futures = []
    for _ in range(100):
        for to in ("worker0", "worker1", "worker2"):
            futures.append(rpc.rpc_async(to, f.identity, args=(rrefs,)))
    for future in futures:
        assert [rref.to_here() for rref in future.wait()] == [0, 1, 2]


def test_many_references_passed_at_once(workers: Cluster) -> None:
    handles = [workers.start(rank, _storm) for rank in range(3)]
    for handle in handles:
        handle.result()


def _operations_of_calls_to_the_owner(calls: int) -> int:
    """How many batches of operations this worker sends and gets during calls that pass a reference to its owner."""
    rref = rpc.remote("worker1", g.Thing, args=("lent",))
    wait_until(rref.confirmed_by_owner)
    batches = 0
    sent, operate = ControlSender._transmit, RRefContext.operate

    def count_sent(self: ControlSender, peer: int) -> None:
        nonlocal batches
        batches += 1
        sent(self, peer)

    def count_received(self: RRefContext, *args: Any) -> bytes:
        nonlocal batches
        batches += 1
        return operate(self, *args)

    with (
        mock.patch.object(ControlSender, "_transmit", count_sent),
        mock.patch.object(RRefContext, "operate", count_received),
    ):
        first = rpc.rpc_sync("worker1", _is_mine, args=(rref,))
        for number in range(calls):
            if number % 3 == 0:
                assert rpc.rpc_sync("worker1", _is_mine, args=(rref,)) == first
            elif number % 3 == 1:
                assert rpc.rpc_async("worker1", _is_mine, args=(rref,)).wait() == first
            else:
                assert rpc.rpc_sync("worker1", _are_mine, args=([rref, {"nested": rref}],)) == [first, first]
        # An operation would wait for others for a few milliseconds: a fork that has to be accepted makes one.
        rpc.rpc_sync("worker1", g.keep, args=("kept by the owner", rref))
    return batches


def _are_mine(things: list[Any]) -> list[tuple[bool, bool, int]]:
    return [_is_mine(things[0]), _is_mine(things[1]["nested"])]


def test_passing_to_the_owner_in_requests_takes_no_operations(workers: Cluster) -> None:
    assert workers.run(0, _operations_of_calls_to_the_owner, 60) == 0
    wait_until(lambda: workers.run(1, g.things, "lent") == 1)  # the owner keeps it
    workers.run(1, g.let_go, "kept by the owner")
    wait_until(lambda: workers.run(1, g.things, "lent") == 0)


def _send_and_drop() -> list[int]:
    """The program drops a reference at once after it has sent it to its owner."""
    futures = []
    for number in range(50):
        rref = rpc.remote("worker1", torch.full, args=((2,), number))
        rref.to_here()
        futures.append(rpc.rpc_async("worker1", _first_element, args=(rref,)))
        del rref
    return [future.wait() for future in futures]


def _first_element(rref: Any) -> int:
    return int(rref.local_value()[0])


def test_lent_reference_is_held_until_the_call_has_ended(workers: Cluster) -> None:
    assert workers.run(0, _send_and_drop) == list(range(50))
    wait_until(lambda: workers.run(1, owned) == 0)
