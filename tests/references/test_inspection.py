"""``live_references`` and the counts of references in ``get_debug_info``."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.rpc.inspection import size_of
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import counts, wait_until
from tests.support.workers import Cluster


def test_sizes_of_values() -> None:
    tensor = torch.zeros(100)
    assert size_of(tensor) == 400
    assert size_of(torch.zeros(100, dtype=torch.int8)) == 100
    assert size_of(torch.zeros(1000)[:10]) == 40
    linear = torch.nn.Linear(10, 5)
    assert size_of(linear) == 4 * (10 * 5 + 5)
    assert size_of(torch.nn.Sequential(linear, linear)) == size_of(linear)  # a parameter counts once
    assert size_of(torch.nn.BatchNorm1d(3)) == 4 * 4 * 3 + 8  # buffers, too
    empty: list[Any] = []
    assert size_of(empty) == sys.getsizeof(empty)
    for container in ([tensor, tensor.clone()], (tensor, tensor.clone()), {"a": tensor, "b": [tensor.clone()]}):
        assert 800 < size_of(container) < 1500
    assert size_of([tensor, tensor]) < 800  # the same one twice
    assert size_of({tensor}) > 400
    assert size_of("x" * 1000) == sys.getsizeof("x" * 1000)
    assert size_of(linear.state_dict()) > size_of(linear)


class RaisingSize:
    def __sizeof__(self) -> int:
        raise RuntimeError("none of your business")


class RaisingMapping(dict[str, Any]):
    def values(self) -> Any:
        raise RuntimeError("none of your business")


def test_sizes_of_unusual_values() -> None:
    """Unusual values (recursive, deep, lazy, sparse, or raising) must not make the inspection fail."""
    itself: list[Any] = []
    itself.append(itself)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    lazy = torch.nn.LazyLinear(3)
    sparse = torch.eye(4).to_sparse()
    compressed = torch.eye(4).to_sparse_csr()
    for value in (
        itself,
        deep,
        lazy,
        lazy.weight,
        sparse,
        compressed,
        RaisingSize(),
        [RaisingSize()],
        RaisingMapping(a=1),
    ):
        assert size_of(value) >= 0
    assert size_of(sparse) >= 4 * 4
    while deep:
        deep = deep.pop()  # freeing it at once would recurse too deeply


def _references_of_the_owner() -> None:
    big = rpc.remote("worker1", torch.zeros, args=(1000,))
    model = rpc.remote("worker1", torch.nn.Linear, args=(10, 10))
    pending = rpc.remote("worker1", g.at_gate, args=("inspected",))
    failed = rpc.remote("worker1", f.raise_custom)
    given = rpc.rpc_sync("worker1", g.own, args=("inspected",))
    also = rpc.rpc_sync("worker2", f.identity, args=(big,))
    for rref in (big, model, failed):
        rref._get_future().wait()
    assert also.to_here().shape == (1000,)

    def look() -> list[rpc.LiveReference]:
        return rpc.rpc_sync("worker1", rpc.live_references)  # type: ignore[no-any-return]

    # Worker 2 has passed it on and dropped it.
    wait_until(lambda: sum(len(each.holders) for each in look()) == 6)
    found = look()
    assert [each.nbytes for each in found] == sorted((each.nbytes for each in found), reverse=True)
    assert [each.type for each in found[:2]] == ["Tensor", "Linear"]
    tensor, linear = found[:2]
    assert (tensor.nbytes, linear.nbytes) == (4000, 440)
    assert tensor.holders == ("worker0", "worker0")
    assert linear.holders == ("worker0",)
    assert (tensor.role, tensor.owner, tensor.state, tensor.made_by) == ("owner", "worker1", "made", "torch:zeros")
    assert tensor.created_at.startswith(f"{__file__}:")
    assert 0 <= tensor.seconds < 60
    by_type = {each.type: each for each in found}
    assert set(by_type) == {"Tensor", "Linear", "Thing", ""}
    assert by_type["Thing"].created_at.startswith(g.__file__)
    assert sum(each.type == "" and each.nbytes == 0 for each in found) == 2  # the pending one and the failed one
    assert str(tensor) == (
        f"{tensor.id}: a Tensor of 4000 bytes (made), held by worker0, worker0, made by torch:zeros, "
        f"created at {tensor.created_at}"
    )
    mine = rpc.live_references()
    assert {each.role for each in mine} == {"user"}
    assert {each.owner for each in mine} == {"worker1"}
    assert sorted(each.state for each in mine) == ["confirmed"] * 5 + ["creating"]
    assert sum(each.created_at.startswith(f"{__file__}:") for each in mine) == 4  # those that remote() made here
    assert str(mine[0]).startswith(f"{mine[0].id}: a value on worker1 (")
    with pytest.raises(AttributeError):
        mine[0].state = "changed"  # type: ignore[misc]
    rpc.rpc_sync("worker1", g.open_gate, args=("inspected",))
    assert pending.to_here() is None
    assert given.rpc_sync().plus(1) == 1


def test_live_references(workers: Cluster) -> None:
    workers.run(0, _references_of_the_owner)
    for rank in range(3):
        wait_until(lambda: workers.run(rank, rpc.live_references) == [])  # noqa: B023


def _keep_one(owner: str) -> None:
    g.kept["aged"] = rpc.remote(owner, f.add, args=(1,))
    assert g.kept["aged"].to_here() == 2


def _ages_after_a_jump(seconds: float) -> list[float]:
    real = time.time
    time.time = lambda: real() + seconds
    try:
        return [reference.seconds for reference in rpc.live_references()]
    finally:
        time.time = real


@pytest.mark.parametrize("seconds", [-86400.0, 86400.0])
def test_ages_do_not_depend_on_the_wall_clock(workers: Cluster, seconds: float) -> None:
    workers.run(0, _keep_one, "worker1")
    (age,) = workers.run(1, _ages_after_a_jump, seconds)
    assert 0 <= age < 600
    workers.run(0, g.let_go, "aged")
    wait_until(lambda: workers.run(1, rpc.live_references) == [])


def _counts() -> None:
    rrefs = [rpc.remote("worker1", f.add, args=(i,)) for i in range(3)]
    pending = rpc.remote("worker1", g.at_gate, args=("numbers",))
    for rref in rrefs:
        rref._get_future().wait()
    both = rpc.rpc_sync("worker2", f.identity, args=(rrefs[0],))
    wait_until(lambda: rpc.rpc_sync("worker1", counts)["num_forks"] == 5)
    there = rpc.rpc_sync("worker1", rpc._rref_context_get_debug_info)
    assert there == {
        "num_owner_rrefs": "4",
        "num_forks": "5",
        "num_pending_users": "0",
        "num_pending_futures": there["num_pending_futures"],
    }
    here = rpc.debug_info()
    assert all(isinstance(value, int | float) for value in here.values())
    assert here["references.num_users"] == 5
    assert here["references.num_pending_users"] == 1
    assert here["references.num_owner_rrefs"] == 0
    assert here["agent.client_active_calls"] >= 1
    assert {"agent.thread_pool_size", "agent.num_idle_threads", "references.num_pending_operations"} <= set(here)
    texts = rpc._get_debug_info()
    assert all(
        isinstance(value, str)
        for key, value in texts.items()
        if "backward_passes" not in key and "autograd_contexts" not in key
    )
    assert texts["num_pending_users"] == "1"
    assert {"agent.thread_pool_size", "num_owner_rrefs"} <= set(texts)
    rpc.rpc_sync("worker1", g.open_gate, args=("numbers",))
    pending._get_future().wait()
    assert rpc.debug_info()["references.num_pending_users"] == 0
    assert both.to_here() == 1


def test_counts_in_debug_info(workers: Cluster) -> None:
    workers.run(0, _counts)


def _inspect_while_references_change() -> None:
    stop = threading.Event()
    errors: list[BaseException] = []

    def look() -> None:
        try:
            while not stop.is_set():
                rpc.live_references()
                rpc.debug_info()
                rpc.rpc_sync("worker1", rpc.live_references)
        except BaseException as error:
            errors.append(error)

    watcher = threading.Thread(target=look)
    watcher.start()
    table = rpc.remote("worker1", g.Table)
    for i in range(300):
        rref = rpc.remote("worker1", f.identity, args=([i],))
        table.rpc_async().change(i)
        rpc.rpc_sync("worker2", f.noop) if i % 50 == 0 else rref.to_here()
    stop.set()
    watcher.join()
    assert errors == []


def test_live_references_while_references_come_and_go(workers: Cluster) -> None:
    workers.run(0, _inspect_while_references_change)
