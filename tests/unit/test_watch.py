"""Who is told what when the members change, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from farprop.ids import WorkerInfo
from farprop.runtime.watch import Watch


class Group:
    """The members as the store lists them, and a pool whose jobs ``settle`` runs."""

    is_static = False
    own = WorkerInfo("me", 0)

    def __init__(self) -> None:
        self.entries: dict[str, Any] = {}
        self.left: set[str] = set()
        self.replaced: set[str] = set()
        self.dead: set[str] = set()
        self.looked: list[int] = []
        self.told: list[tuple[Any, ...]] = []
        self.jobs: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.watch = Watch(
            self,  # type: ignore[arg-type]
            lambda rank, instance: instance in self.dead,
            lambda function, *args: self.jobs.append((function, args)),
            lambda when, callback: None,
            self.looked.append,
        )

    def add(self, name: str, rank: int, instance: str) -> None:
        self.entries = {**self.entries, name: SimpleNamespace(name=name, rank=rank, instance=instance)}

    def remove(self, name: str) -> None:
        self.entries = {key: entry for key, entry in self.entries.items() if key != name}

    def refresh(self) -> None: ...

    refresh_if_grown = refresh

    def find(self, name: str) -> Any:
        return self.entries.get(name)

    def info(self, name: str) -> WorkerInfo:
        return WorkerInfo(name, self.entries[name].rank)

    def has_left(self, instance: str) -> bool:
        return instance in self.left

    def was_replaced(self, instance: str) -> bool:
        return instance in self.replaced

    def settle(self) -> list[tuple[Any, ...]]:
        """Look at the members, run what is due, and return what was told since the last time."""
        self.watch._poll()
        while self.jobs:
            function, args = self.jobs.popleft()
            function(*args)
        told, self.told = self.told, []
        return told

    def register(self) -> None:
        self.watch.on_join(lambda info: self.told.append(("join", info.name)))
        self.watch.on_leave(lambda info: self.told.append(("leave", info.name)))
        for name in self.entries:
            self.watch.on_failure(name, lambda info, reason: self.told.append(("failure", info.name)))


@pytest.fixture
def group() -> Group:
    made = Group()
    made.add("ann", 1, "a1")
    made.add("bob", 2, "b1")
    made.register()
    return made


def test_members_that_were_there_before_are_watched_and_not_told(group: Group) -> None:
    assert group.settle() == []
    assert set(group.looked) == {1, 2}


def test_joining_and_leaving(group: Group) -> None:
    group.add("eve", 3, "e1")
    assert group.settle() == [("join", "eve")]
    assert 3 in group.looked
    group.left.add("e1")
    group.remove("eve")
    assert group.settle() == [("leave", "eve")]
    assert group.settle() == []


def test_death_is_told_once(group: Group) -> None:
    group.dead.add("a1")
    for _ in range(2):
        group.watch.died(1, "a1", "gone")
    group.watch.died(1, None, "gone")
    assert group.settle() == [("leave", "ann"), ("failure", "ann")]
    assert not group.watch.concerned_with(1)
    assert group.watch.concerned_with(2)


def test_worker_that_has_left_has_not_died(group: Group) -> None:
    """The failure detector finds nobody at its address, but the store says why."""
    group.left.add("a1")
    group.remove("ann")
    group.watch.died(1, "a1", "refused")
    assert group.settle() == [("leave", "ann")]


@pytest.mark.parametrize(("name", "rank"), [("ann", 1), ("ann", 7), ("joe", 1)])
def test_successor_is_told_after_the_death(group: Group, name: str, rank: int) -> None:
    """Also if the place of the dead one is not marked yet."""
    group.add(name, rank, "a2")
    assert group.settle() == [("leave", "ann"), ("failure", "ann"), ("join", name)]
    group.replaced.add("a1")
    group.watch.died(1, None, "replaced", unless="a2")
    assert group.settle() == []


def test_list_that_was_read_earlier_is_no_death(group: Group) -> None:
    """Another thread has read the store before a worker joined, and sets the list after it was told."""
    before = group.entries
    group.add("eve", 3, "e1")
    assert group.settle() == [("join", "eve")]
    after, group.entries = group.entries, before
    assert group.settle() == []
    group.entries = after
    assert group.settle() == []


def test_callback_that_exits_does_not_keep_others_from_being_told(group: Group) -> None:
    def leave(info: WorkerInfo) -> None:
        raise SystemExit

    group.watch.on_join(leave)
    group.watch.on_join(lambda info: group.told.append(("second", info.name)))
    group.add("eve", 3, "e1")
    assert group.settle() == [("join", "eve"), ("second", "eve")]
    group.add("joe", 4, "j1")
    assert group.settle() == [("join", "joe"), ("second", "joe")]


def test_job_ends_for_the_first_death(group: Group) -> None:
    ended: list[tuple[str, str]] = []
    group.watch.end_job_on_failure(lambda info, reason: ended.append((info.name, reason)))
    group.left.add("b1")
    group.remove("bob")
    group.settle()
    assert ended == []
    group.add("eve", 3, "e1")
    group.settle()
    group.watch.died(3, "e1", "first")
    group.watch.died(1, "a1", "second")
    group.settle()
    assert set(ended) == {("eve", "first")}


def test_nobody_is_told_after_close(group: Group) -> None:
    group.add("eve", 3, "e1")
    group.watch.close()
    group.watch.died(1, "a1", "gone")
    assert group.settle() == []
