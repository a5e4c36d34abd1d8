"""References in requests, which the callee borrows until the call has ended."""

from __future__ import annotations

import asyncio
import collections
import gc
import weakref
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from farprop.protocol.references.control_plane import ControlPlane, Operation
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import all_empty, wait_until
from tests.support.workers import Cluster, cluster

_posted: collections.Counter[str] = collections.Counter()


def _note_operations() -> None:
    """From now on, this worker notes the operations on references that it has others do."""
    original = ControlPlane.post

    def post(self: ControlPlane, peer: int, operation: Operation) -> None:
        if peer != self.own_rank:
            _posted[operation.kind.name] += 1
        original(self, peer, operation)

    ControlPlane.post = post  # type: ignore[method-assign]


def _so_far() -> dict[str, int]:
    return dict(_posted)


def _operations() -> dict[str, int]:
    noted = dict(_posted)
    _posted.clear()
    return noted


@pytest.fixture(scope="module")
def noting() -> Any:
    with cluster(4) as c:
        for rank in range(4):
            c.run(rank, _note_operations)
        yield c


def _operations_of_all(c: Cluster) -> list[dict[str, int]]:
    all_empty(c)
    return [c.run(rank, _operations) for rank in range(4)]


async def _to_here_async(rref: Any) -> Any:
    return await rref


@rpc.functions.async_execution
def _to_here_later(rref: Any) -> torch.futures.Future[Any]:
    return rpc.rpc_async(rref.owner(), f.add, args=(rref.to_here(), 0))


def _pass_on(rref: Any, to: str) -> Any:
    return rpc.rpc_sync(to, g.to_here, args=(rref,))


def _use_mine_elsewhere() -> None:
    mine = rpc.RRef(5)
    for function in (g.to_here, _to_here_async):
        assert rpc.rpc_sync("worker2", function, args=(mine,)) == 5
        assert rpc.rpc_async("worker2", function, args=(mine,)).wait() == 5


def test_a_value_of_the_caller_is_used_without_any_operation(noting: Cluster) -> None:
    noting.run(0, _use_mine_elsewhere)
    assert _operations_of_all(noting) == [{}, {}, {}, {}]


def _use_theirs_elsewhere() -> None:
    theirs = rpc.remote("worker1", f.identity, args=(5,))
    for function in (g.to_here, _to_here_async, _to_here_later):
        assert rpc.rpc_sync("worker2", function, args=(theirs,)) == 5
        assert rpc.rpc_async("worker2", function, args=(theirs,)).wait() == 5
    assert rpc.rpc_sync("worker0", g.to_here, args=(theirs,)) == 5


def test_a_value_of_a_third_worker_is_used_without_any_operation(noting: Cluster) -> None:
    noting.run(0, _use_theirs_elsewhere)
    assert _operations_of_all(noting) == [{"DELETE": 1}, {}, {}, {}]  # that of the caller itself


def _remote_with_arguments() -> None:
    mine = rpc.RRef(5)
    theirs = rpc.remote("worker1", f.identity, args=(6,))
    results = [rpc.remote("worker2", g.to_here, args=(rref,)) for rref in (mine, theirs)]
    assert [result.to_here() for result in results] == [5, 6]


def test_arguments_of_remote_need_no_operation(noting: Cluster) -> None:
    noting.run(0, _remote_with_arguments)
    assert _operations_of_all(noting) == [{"DELETE": 3}, {}, {}, {}]  # those of remote()


def _through_two() -> None:
    for rref in (rpc.RRef(5), rpc.remote("worker1", f.identity, args=(5,))):
        assert rpc.rpc_sync("worker2", _pass_on, args=(rref, "worker3")) == 5
    assert rpc.rpc_sync("worker2", _pass_on, args=(rpc.RRef(5), "worker0")) == 5  # back to the owner


def test_a_borrowed_reference_is_passed_on_without_any_operation(noting: Cluster) -> None:
    noting.run(0, _through_two)
    assert _operations_of_all(noting) == [{"DELETE": 1}, {}, {}, {}]


def _give_and_see() -> None:
    for rref in (rpc.RRef(5), rpc.remote("worker1", f.identity, args=(5,))):
        rpc.rpc_sync("worker2", g.keep, args=("stored", rref))
        del rref
        assert rpc.rpc_sync("worker2", g.kept_state, args=("stored",)) == "CONFIRMED"
        assert rpc.rpc_sync("worker2", g.kept_value, args=("stored",)) == 5
        rpc.rpc_sync("worker2", g.let_go, args=("stored",))


def test_a_stored_reference_is_listed_when_the_call_returns(noting: Cluster) -> None:
    noting.run(0, _give_and_see)
    assert _operations_of_all(noting)[2] == {"ACCEPT": 2, "REGISTER": 1, "DELETE": 2}


class _Cycle:
    def __init__(self, rref: Any) -> None:
        self.rref = rref
        self.itself = self


_cycle: list[weakref.ref[_Cycle]] = []


def _into_a_cycle(rref: Any) -> None:
    gc.disable()
    _cycle.append(weakref.ref(_Cycle(rref)))


def _value_in_the_cycle() -> Any:
    gc.enable()
    cycle = _cycle.pop()()
    assert cycle is not None
    return cycle.rref.to_here()


def _leave_in_a_cycle() -> None:
    rref = rpc.remote("worker1", f.identity, args=(5,))
    rpc.rpc_sync("worker2", _into_a_cycle, args=(rref,))
    del rref
    assert rpc.rpc_sync("worker2", _value_in_the_cycle) == 5


def test_a_reference_in_garbage_counts_as_stored(noting: Cluster) -> None:
    noting.run(0, _leave_in_a_cycle)
    assert _operations_of_all(noting)[2] == {"ACCEPT": 1, "REGISTER": 1, "DELETE": 1}


def _return_it() -> None:
    for rref in (rpc.RRef(5), rpc.remote("worker1", f.identity, args=(5,))):
        back = rpc.rpc_sync("worker2", f.identity, args=(rref,))
        del rref
        assert back.to_here() == 5


def test_a_borrowed_reference_is_returned(noting: Cluster) -> None:
    noting.run(0, _return_it)
    _operations_of_all(noting)


def _fail(rref: Any) -> None:
    raise KeyError(str(rref.to_here()))


def _let_it_fail() -> None:
    for rref in (rpc.RRef(5), rpc.remote("worker1", f.identity, args=(5,))):
        with pytest.raises(KeyError, match="5"):
            rpc.rpc_sync("worker2", _fail, args=(rref,))


def test_a_function_that_raises_leaks_nothing(noting: Cluster) -> None:
    noting.run(0, _let_it_fail)
    _operations_of_all(noting)


# Calls that take long


def _is_confirmed_after_a_while(rref: Any) -> bool:
    users = current_agent().references.users
    users._on_long_borrowed()
    users._on_long_borrowed()
    return bool(rref.confirmed_by_owner())  # the owner has hardly heard of it yet


def _have_it_confirmed() -> None:
    for rref in (rpc.RRef(5), rpc.remote("worker1", f.identity, args=(5,))):
        assert rpc.rpc_sync("worker2", _is_confirmed_after_a_while, args=(rref,))


def test_a_reference_is_confirmed_however_long_the_call_takes(noting: Cluster) -> None:
    """As in torch, a function never gets one that is not: its caller keeps the value. On a busy machine it was not."""
    noting.run(0, _have_it_confirmed)
    _operations_of_all(noting)


def _at_gate(rref: Any, gate: str) -> Any:
    g.note(f"{gate} is reached")
    return rref.to_here() + len(g.at_gate(gate, ""))


async def _drop_at_gate(rref: Any, gate: str) -> None:
    del rref
    while not g.gates[gate].is_set():
        await asyncio.sleep(0.005)


def _holders() -> list[list[int]]:
    return [holders for _, holders in current_agent().references.snapshot()[1]]


def _call_at_gate(function: Any, gate: str, timeout: float = 0.0) -> None:
    rref = rpc.remote("worker1", f.identity, args=(5,))
    g.kept["answer"] = rpc.rpc_async("worker2", function, args=(rref, gate), timeout=timeout)


def test_a_long_call_does_not_depend_on_its_caller() -> None:
    with cluster(3, check=False) as c:
        c.run(0, _call_at_gate, _keep_the_value, "long")
        wait_until(lambda: 2 in [rank for holders in c.run(1, _holders) for rank in holders], "worker2 is listed")
        c.kill(0)
        wait_until(lambda: c.run(1, _holders) == [[2]], "the caller is dead")
        c.run(2, g.open_gate, "long")
        wait_until(lambda: c.run(2, g.noted) == [5])
        all_empty(c, (1, 2))


def _keep_the_value(rref: Any, gate: str) -> None:
    g.at_gate(gate)
    g.note(rref.to_here())


def test_what_a_long_call_drops_is_given_back_before_it_ends(noting: Cluster) -> None:
    noting.run(0, _call_at_gate, _drop_at_gate, "dropped")
    wait_until(lambda: noting.run(2, _so_far) == {"RETURN": 1})
    noting.run(2, g.open_gate, "dropped")
    noting.run(0, _take_answer)
    assert _operations_of_all(noting)[2] == {"RETURN": 1}


def _take_answer() -> Any:
    return g.kept.pop("answer").wait()


def _time_out() -> None:
    _call_at_gate(_at_gate, "late", timeout=0.02)
    with pytest.raises(RpcTimeoutError):
        _take_answer()


def test_the_value_stays_if_the_caller_gives_up(noting: Cluster) -> None:
    noting.run(0, _time_out)
    wait_until(lambda: "late is reached" in noting.run(2, g.noted))
    assert noting.run(1, _holders) != []
    noting.run(2, g.open_gate, "late")
    _operations_of_all(noting)


# Connections that break


def _cut(rank: int) -> None:
    current_agent().peers.by_rank[rank]._connection.hang_up()


def test_a_connection_that_breaks_during_the_call(noting: Cluster) -> None:
    noting.run(0, _call_at_gate, _at_gate, "cut")
    wait_until(lambda: "cut is reached" in noting.run(2, g.noted))
    noting.run(0, _cut, 2)
    noting.run(2, g.open_gate, "cut")
    noting.run(0, _lost_answer)
    _operations_of_all(noting)


def _lost_answer() -> None:
    with pytest.raises(ConnectionError):
        _take_answer()
