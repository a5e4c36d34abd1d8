"""Who is in a dynamic group, as its store says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from farprop.protocol.roster import Entry
from farprop.protocol.signing import CALLS, Keys
from farprop.runtime.liveness import Verdict
from farprop.runtime.rendezvous import Places

_KEYS = Keys(b"k" * 32, "0" * 32, CALLS)


class _Store:
    """A store that does something after the places were counted for the next time."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.after_count: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def add(self, key: str, step: int) -> int:
        count = self._store.add(key, step)
        after, self.after_count = self.after_count, None
        if after is not None:
            after()
        return count


def _entry(name: str, rank: int, instance: str) -> Entry:
    return Entry(name, rank, 0, instance, ("127.0.0.1", 5), "u", "n", "host", 9, True)


def _places(store: Any, name: str, rank: int, instance: str) -> Places:
    return Places(store, _KEYS, _entry(name, rank, instance))


def test_worker_that_is_replaced_while_the_places_are_read_is_listed() -> None:
    shared = dist.HashStore()
    store = _Store(shared)
    own = _places(store, "ann", 0, "a")
    own.enter(lambda entry, deadline: Verdict.DEAD, 10)
    _places(shared, "bob", 1, "old").enter(lambda entry, deadline: Verdict.DEAD, 10)
    assert own.members()["bob"].instance == "old"
    successor = _places(shared, "bob", 1, "new")
    store.after_count = lambda: successor.enter(lambda entry, deadline: Verdict.DEAD, 10)
    assert own.members()["bob"].instance == "new"
    assert own.was_replaced("old")
    assert not own.may_have_grown()
