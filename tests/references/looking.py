"""Helpers that read the counts of references on workers, and wait for the expected ones."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable

from farprop.runtime.agent_registry import current_agent
from tests.references.functions import kept
from tests.support.workers import Cluster

PATIENCE = 20.0


def wait_until(condition: Callable[[], object], what: str = "", seconds: float = PATIENCE) -> None:
    """Poll until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"after {seconds:g} s still not: {what or condition}")
        time.sleep(0.002)


def counts() -> dict[str, int]:
    """The counts of this worker's references. All are 0 when no references are left."""
    references = current_agent().references
    values = references.values
    return {**references.counts(), "early": len(values.early_slots), "own_calls": len(values._own_calls)}


def owned() -> int:
    """The number of this worker's values that other workers refer to."""
    return counts()["num_owner_rrefs"]


def validate() -> None:
    references = current_agent().references
    references._guard.locked(references._machine.validate)


def become_empty(seconds: float = PATIENCE) -> None:
    """Wait until this worker has no references and no pending operations on them."""
    gc.collect()
    try:
        wait_until(lambda: not any(counts().values()), seconds=seconds)
    except AssertionError:
        left = {key: count for key, count in counts().items() if count}
        users, values = current_agent().references.snapshot()
        states = [(str(u.rref), u.state.name) for u in users] + [(str(v.rref), v.state.name) for v, _ in values]
        raise AssertionError(f"left after {seconds:g} s: {left}\n{states[:20]}") from None
    validate()


def drop_all() -> None:
    """Drop everything that this worker keeps, and check that no references are left."""
    kept.clear()
    become_empty()


def all_empty(job: Cluster, ranks: Iterable[int] = range(3)) -> None:
    """Wait until no worker has references."""
    # First on all workers, because a cycle on one (tracebacks make such) may hold a value of another.
    for rank in ranks:
        job.run(rank, gc.collect)
    # What another worker still does may fill a table again, so check all workers twice.
    for _ in range(2):
        for rank in ranks:
            job.run(rank, become_empty)
