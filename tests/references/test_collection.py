"""A value is freed when the last reference to it is dropped, on any worker and in any way."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.testing import faults
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import owned, wait_until
from tests.support.workers import Cluster


def _wait_until_freed(worker: str, name: str) -> None:
    """Wait until the things with this name are freed, without the help of the cycle collector."""
    wait_until(lambda: rpc.rpc_sync(worker, g.things, args=(name,)) == 0, f"no {name} on {worker}")


def _without_cycle_collector(body: Any, *args: Any) -> None:
    gc.disable()
    try:
        body(*args)
    finally:
        gc.enable()


def _last_reference() -> None:
    rref = rpc.remote("worker1", g.Thing, args=("last",))
    other = rpc.rpc_sync("worker2", f.identity, args=(rref,))
    assert rref.rpc_sync().plus(1) == 1
    info = rpc.rpc_sync("worker1", rpc._rref_context_get_debug_info)
    assert info["num_owner_rrefs"] == "1"
    (live,) = rpc.rpc_sync("worker1", rpc.live_references)
    assert live.type == "Thing"
    del rref
    assert other.rpc_sync().plus(1) == 2
    del other
    _wait_until_freed("worker1", "last")
    assert rpc.rpc_sync("worker1", rpc.live_references) == []
    assert rpc.rpc_sync("worker1", rpc._rref_context_get_debug_info)["num_owner_rrefs"] == "0"


def _owner_and_user() -> None:
    mine = rpc.RRef(g.Thing("mine"))
    thing = weakref.ref(mine.local_value())
    rpc.rpc_sync("worker1", g.keep, args=("mine", mine))
    assert owned() == 1
    del mine
    assert thing() is not None
    rpc.rpc_sync("worker1", g.let_go, args=("mine",))
    wait_until(lambda: thing() is None)
    # The user drops it first.
    mine = rpc.RRef(g.Thing("mine"))
    thing = weakref.ref(mine.local_value())
    rpc.rpc_sync("worker1", f.identity, args=(mine,))
    wait_until(lambda: owned() == 0)
    assert mine.local_value() is thing()
    del mine
    wait_until(lambda: thing() is None)  # the thread that frees it may still refer to it


def _dropped_before_the_call_runs() -> None:
    rref = rpc.remote("worker1", g.gated_thing, args=("dropped", "dropped early"))
    del rref
    rpc.rpc_sync("worker1", g.open_gate, args=("dropped",))
    wait_until(lambda: "dropped early" in rpc.rpc_sync("worker1", g.noted))  # it did run
    _wait_until_freed("worker1", "dropped early")
    # On the own worker.
    rpc.remote("worker0", g.gated_thing, args=("dropped here", "dropped here"))
    g.open_gate("dropped here")
    wait_until(lambda: "dropped here" in g.ran)
    wait_until(lambda: g.things("dropped here") == 0)


def _value_with_references() -> None:
    inner = rpc.remote("worker2", g.Thing, args=("inner",))
    outer = rpc.remote("worker1", g.Thing, args=("outer", [inner]))
    outer.rpc_sync().plus(1)
    del inner
    assert rpc.rpc_sync("worker2", g.things, args=("inner",)) == 1
    # and a cycle that the collector of one worker can see
    outer.rpc_sync().set_inner([g.Chain(rpc.remote("worker2", g.Thing, args=("in a chain",)))])
    _wait_until_freed("worker2", "inner")
    assert rpc.rpc_sync("worker2", g.things, args=("in a chain",)) == 1
    del outer
    _wait_until_freed("worker1", "outer")
    _wait_until_freed("worker2", "in a chain")


def _failed_uses() -> None:
    """An error keeps its frames alive only as long as something refers to the error."""
    rref = rpc.remote("worker1", g.Thing, args=("failed uses",))
    failed = rpc.remote("worker1", f.raise_custom)
    future = rref.rpc_async().fail()
    for use in (rref.to_here, rref.rpc_sync().fail, rref.rpc_sync().missing, failed.to_here, future.wait, future.wait):
        try:
            use()
        except (TypeError, KeyError, AttributeError, f.Custom):
            continue
        raise AssertionError(f"{use} did not raise")


def _failed_uses_keep_nothing() -> None:
    _failed_uses()
    _wait_until_freed("worker1", "failed uses")
    wait_until(lambda: rpc.rpc_sync("worker1", owned) == 0)


@pytest.mark.parametrize(
    "body",
    [
        _last_reference,
        _owner_and_user,
        _dropped_before_the_call_runs,
        _value_with_references,
        _failed_uses_keep_nothing,
    ],
)
def test_a_value_is_freed_with_its_last_reference(workers: Cluster, body: Any) -> None:
    workers.run(0, _without_cycle_collector, body)


@rpc.functions.async_execution
def _fails_later(name: str) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    error = ValueError("with a thing")
    error.thing = g.Thing(name)  # type: ignore[attr-defined]
    future.set_exception(error)
    return future


def _failed_futures_on_the_callee() -> None:
    rref = rpc.remote("worker1", g.Failing)
    for call in (
        lambda: rpc.rpc_sync("worker1", _fails_later, args=("failed future",)),
        lambda: rref.rpc_sync().later("failed future"),
        lambda: rpc.remote("worker1", _fails_later, args=("failed future",)).to_here(),
    ):
        with pytest.raises(RuntimeError, match="with a thing"):
            call()
    rpc.rpc_sync("worker1", gc.collect)  # the function itself makes a cycle
    _wait_until_freed("worker1", "failed future")


def test_a_failed_future_is_freed_on_the_callee(workers: Cluster) -> None:
    workers.run(0, _failed_futures_on_the_callee)


def _own_many(count: int) -> list[Any]:
    return [rpc.RRef(i) for i in range(count)]


def _drop_ten_thousand() -> tuple[int, int]:
    many = rpc.rpc_sync("worker1", _own_many, args=(10_000,))
    assert rpc.rpc_sync("worker1", owned) == 10_000
    assert many[1234].to_here() == 1234
    with faults.inject() as plan:
        plan.delay(0.0, types=["RREF_USER_DELETE"])  # to count them
        del many
        wait_until(lambda: rpc.rpc_sync("worker1", owned) == 0)
    return plan.counts["delay RREF_USER_DELETE"], plan.counts.total()


def test_ten_thousand_dropped_references_take_a_few_messages(workers: Cluster) -> None:
    deletes, all_of_them = workers.run(0, _drop_ten_thousand)
    assert deletes == all_of_them
    assert 3 <= deletes < 100


def _make_and_drop_one_by_one() -> int:
    with faults.inject() as plan:
        plan.delay(0.0, types=["RREF_USER_DELETE"])
        for i in range(2000):
            assert rpc.remote("worker1", f.add, args=(i,)) is not None
        wait_until(lambda: rpc.rpc_sync("worker1", owned) == 0)
    return plan.counts.total()


def test_deletes_of_references_are_batched(workers: Cluster) -> None:
    assert workers.run(0, _make_and_drop_one_by_one) < 500


def _drop_from_many_threads() -> None:
    many = rpc.rpc_sync("worker1", _own_many, args=(4000,))
    start = threading.Barrier(8)

    def drop(part: list[Any]) -> None:
        start.wait()
        while part:
            part.pop()
            if len(part) % 50 == 0:
                assert rpc.remote("worker1", f.add, args=(1,)).to_here() == 2

    threads = [threading.Thread(target=drop, args=(many[i::8],)) for i in range(8)]
    del many
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: rpc.rpc_sync("worker1", owned) == 0)


def test_many_threads_can_drop_references_at_once(workers: Cluster) -> None:
    workers.run(0, _drop_from_many_threads)


def _drop_in_callbacks() -> None:
    held = [rpc.remote("worker1", g.Thing, args=("callback",)) for _ in range(50)]
    futures = [rref.rpc_async().plus(i) for i, rref in enumerate(held)]
    done = []
    for future in futures:
        future.then(lambda _: done.append(held.pop()))
    torch.futures.wait_all(futures)
    wait_until(lambda: len(done) == 50)
    del future, futures
    rpc.rpc_async("worker1", f.noop).then(lambda _: done.clear()).wait()
    _wait_until_freed("worker1", "callback")


def test_references_can_be_dropped_in_callbacks(workers: Cluster) -> None:
    workers.run(0, _drop_in_callbacks)


class Holder:
    """Drops its reference in its finaliser. It is in a cycle, so the collector may run the finaliser at any moment."""

    def __init__(self, rref: Any) -> None:
        self.rref = rref
        self.me = self

    def __del__(self) -> None:
        self.rref = None


def _drop_at_any_moment() -> None:
    before = gc.get_threshold()
    gc.set_threshold(20)  # so that it runs in the middle of farprop's own code
    try:
        for i in range(300):
            Holder(rpc.remote("worker1", f.add, args=(i,)))
            Holder(rpc.rpc_sync("worker1", f.identity, args=(rpc.RRef(i),)))
            Holder(rpc.rpc_sync("worker2", f.identity, args=(rpc.remote("worker1", f.add, args=(1,)),)))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    wait_until(lambda: rpc.rpc_sync("worker1", owned) == 0)


def test_the_cycle_collector_can_drop_references(workers: Cluster) -> None:
    workers.run(0, _drop_at_any_moment)
