"""A launcher's store that outlives the workers: those of the next attempt must not take the last one's for theirs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from farprop.errors import RendezvousError
from farprop.runtime import rendezvous

SIZE = 3


class _KilledError(BaseException):
    pass


class _Client:
    """One worker's connection to the store; the worker is killed after some operations."""

    def __init__(self, store: dist.Store, operations: float) -> None:
        self._store = store
        self._left = operations

    def __getattr__(self, name: str) -> Any:
        if self._left <= 0:
            raise _KilledError
        self._left -= 1
        return getattr(self._store, name)


def _attempt(monkeypatch: pytest.MonkeyPatch, store: dist.Store, killed: int, operations: float) -> list[Any]:
    """Start all ranks; one is killed after some operations, and the others after it. Returns what each found."""
    found: list[Any] = [None] * SIZE
    end = threading.Event()

    def await_or_end(ready: Any, _: float) -> bool:
        while not ready():
            if end.is_set():
                raise _KilledError
        return True

    monkeypatch.setattr(rendezvous, "wait_until", await_or_end)

    def run(rank: int) -> None:
        client: Any = _Client(store, operations if rank == killed else float("inf"))
        try:
            found[rank] = rendezvous.attempt_of(client, rank, SIZE, 1000)
        except _KilledError:
            end.set()  # the launcher ends the others

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("killed", range(SIZE))
def test_whatever_the_last_attempt_has_left(monkeypatch: pytest.MonkeyPatch, killed: int) -> None:
    for operations in range(16):
        store = dist.HashStore()
        before = _attempt(monkeypatch, store, killed, operations)
        again = _attempt(monkeypatch, store, killed, max(0, operations - 3))
        found = _attempt(monkeypatch, store, -1, 0)
        assert len(set(found)) == 1
        assert found[0]
        assert found[0] not in before + again


def test_a_name_that_no_worker_writes() -> None:
    store = dist.HashStore()
    store.set("attempt", "rpc/elsewhere")
    with pytest.raises(RendezvousError, match="'attempt' in the store says 'rpc/elsewhere', which no worker writes"):
        rendezvous.attempt_of(store, 1, SIZE, 10)


def test_who_is_missing() -> None:
    store = dist.HashStore()
    with pytest.raises(RendezvousError, match=r"Ranks 1, 2 of 3 have not called init_rpc within 0 s"):
        rendezvous.attempt_of(store, 0, SIZE, 0.01)
    with pytest.raises(RendezvousError, match=r"Rank 1 of 3 has not called init_rpc"):
        rendezvous.attempt_of(store, 2, SIZE, -1.0)
    with pytest.raises(RendezvousError, match=r"Rank 0 of 3 has not called init_rpc"):
        rendezvous.attempt_of(dist.HashStore(), 2, SIZE, -1.0)
