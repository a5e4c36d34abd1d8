"""Who is in a dynamic group, as its store says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from farprop.ids import WorkerInfo
from farprop.protocol.roster import Entry
from farprop.protocol.signing import CALLS, Keys
from farprop.runtime.liveness import Verdict
from farprop.runtime.membership import Membership
from farprop.runtime.rendezvous import Places

_KEYS = Keys(b"k" * 32, "0" * 32, CALLS)


class _Store:
    """A store that does something after the places were counted, or a key was read, for the next time."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self.after_count: Callable[[], None] | None = None

        self.after_reading: tuple[str, Callable[[], None]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def compare_set(self, key: str, expected: str, desired: str) -> Any:
        value = self._store.compare_set(key, expected, desired)
        if self.after_reading is not None and self.after_reading[0] == key:
            after, self.after_reading = self.after_reading[1], None
            after()
        return value

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


def _is_dead(entry: Entry, deadline: float) -> Verdict:
    return Verdict.DEAD


def test_thread_that_has_read_a_place_earlier_does_not_bring_back_a_worker_that_has_left() -> None:
    """It stayed listed for ever, and who took its rank next was taken for dead."""
    shared = dist.HashStore()
    store = _Store(shared)
    own = _places(store, "ann", 0, "a")
    own.enter(_is_dead, 10)
    bob = _places(shared, "bob", 1, "b")
    bob.enter(_is_dead, 10)
    assert sorted(own.members()) == ["ann", "bob"]

    def meanwhile() -> None:
        bob.leave()
        assert sorted(own.members()) == ["ann"]  # as another thread sees it

    store.after_reading = f"place/{bob._place}", meanwhile
    assert sorted(own.members()) == ["ann"]
    assert store.after_reading is None
    assert own.has_left("b")


def test_older_list_does_not_replace_a_newer_one() -> None:
    shared = dist.HashStore()
    own = _places(shared, "ann", 0, "a")
    own.enter(_is_dead, 10)
    membership = Membership(shared, WorkerInfo("ann", 0), None)
    membership._places = own
    bob = _places(shared, "bob", 1, "b")
    members = own.members

    def slow_members() -> dict[str, Entry]:
        found = members()
        own.members = members  # type: ignore[method-assign]
        bob.enter(_is_dead, 10)
        membership.refresh()  # as another thread does, before this one goes on
        return found

    own.members = slow_members  # type: ignore[method-assign,assignment]
    membership.refresh()
    assert sorted(membership.entries) == ["ann", "bob"]
