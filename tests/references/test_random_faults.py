"""Random programs on three workers, over a network that misbehaves at random: in the end nothing is left anywhere."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, InjectedFaultError, RpcTimeoutError
from farprop.runtime import batches
from farprop.testing import FaultPlan, faults
from tests.calls import functions as f
from tests.references.looking import all_empty, validate
from tests.support.workers import cluster

OPERATIONS = ["RREF_FORK_REQUEST", "RREF_CHILD_ACCEPT", "RREF_USER_DELETE", "RREF_REVOKE", "RREF_RECALL"]
CALLS = ["PYTHON_CALL", "PYTHON_REMOTE_CALL", "PYTHON_RREF_FETCH_CALL"]
STEPS = 200

_lock = threading.Lock()
pool: list[Any] = []  # the references that this worker holds


def _put(rrefs: list[Any]) -> int:
    """Keep them; what is too much is let go of."""
    with _lock:
        pool.extend(rrefs)
        dropped = pool[: max(0, len(pool) - 40)]
        del pool[: len(dropped)]
    return len(dropped)


def _some(seed: int, count: int = 2) -> list[Any]:
    with _lock:
        return random.Random(seed).sample(pool, min(count, len(pool)))


def _forget() -> None:
    with _lock:
        dropped = list(pool)
        pool.clear()
    dropped.clear()


def _make(worker: str, value: Any) -> Any:
    """Have a third worker make it."""
    return rpc.remote(worker, f.identity, args=(value,))


def _lossy(plan: FaultPlan, dice: random.Random) -> None:
    plan.lose(types=OPERATIONS, sends=2, probability=0.15)


def _failing(plan: FaultPlan, dice: random.Random) -> None:
    plan.fail(types=OPERATIONS, sends=3, probability=0.5)
    plan.fail(types=CALLS, probability=0.05)


def _late(plan: FaultPlan, dice: random.Random) -> None:
    plan.delay(0.02, types=OPERATIONS, probability=0.5)
    plan.delay(0.03, types=CALLS, probability=0.2)
    plan.delay(0.001, probability=0.2)


def _cut(plan: FaultPlan, dice: random.Random) -> None:
    for worker in ("worker0", "worker1", "worker2"):
        nth = 0
        for _ in range(12):
            nth += dice.randint(5, 60)
            plan.cut_at(worker, nth)


def _all(plan: FaultPlan, dice: random.Random) -> None:
    for weather in (_cut, _failing, _late):
        weather(plan, dice)


WEATHERS = {"lossy": _lossy, "failing": _failing, "late": _late, "cut": _cut, "all": _all}


def _program(rank: int, seed: int, weather: str) -> tuple[int, int, int]:
    """How many steps worked, how many did not, and how many faults there were."""
    batches._BATCH_SECONDS = 0.1  # as long as it takes to find out that a batch was lost
    dice = random.Random(100 * seed + rank)
    worked = failed = 0
    with faults.inject(seed=dice.randrange(1000)) as plan:
        WEATHERS[weather](plan, dice)
        for step in range(STEPS):
            try:
                _step(dice, (rank, step))
                worked += 1
            except (ConnectionLostError, InjectedFaultError, RpcTimeoutError):
                failed += 1
        _forget()
    validate()
    return worked, failed, plan.counts.total()


def _step(dice: random.Random, value: Any) -> None:
    to, third = dice.choice(["worker0", "worker1", "worker2"]), dice.choice(["worker0", "worker1", "worker2"])
    number = dice.randrange(1 << 30)
    what = dice.randrange(8)
    if what == 0:
        _put([rpc.RRef(value)])
    elif what == 1:
        _put([rpc.remote(to, f.identity, args=(value,))])
    elif what == 2:
        rpc.rpc_sync(to, _put, args=(_some(number, 3),), timeout=5)
    elif what == 3:
        _put(rpc.rpc_sync(to, _some, args=(number,), timeout=5))
    elif what == 4:
        _put([rpc.rpc_async(to, _make, args=(third, value), timeout=5).wait()])
    elif what == 5:
        _put([rpc.remote(to, f.identity, args=(_some(number),), timeout=5)])
    elif what == 6:
        for rref in _some(number):
            found = rref.to_here(timeout=5)
            assert isinstance(found, tuple | list), found
    else:
        with _lock:
            dropped = [pool.pop(dice.randrange(len(pool))) for _ in range(min(3, len(pool)))]
        dropped.clear()


@pytest.mark.parametrize("weather", list(WEATHERS))
def test_nothing_is_left(weather: str) -> None:
    # One transport each, in turn: the network is what is made to misbehave here.
    transport = "tcp" if weather in ("late", "all") else "auto"
    with cluster(3, {"FARPROP_TRANSPORT": transport}) as c:
        handles = [c.start(rank, _program, rank, 7, weather) for rank in range(3)]
        for worked, failed, faulty in [handle.result() for handle in handles]:
            assert worked + failed == STEPS
            assert worked > STEPS / 4
            assert faulty > 10
        for rank in range(3):
            c.run(rank, _forget)
        all_empty(c)
