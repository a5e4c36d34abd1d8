"""The wrapper that finds locks taken in a wrong order, and the table that it reads."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

import farprop
from farprop.locks import make_lock
from tests.support import lock_order
from tests.support.lock_order import LockOrderError, OrderedLock

_MADE = re.compile(r"""(?:make_(?:owned_)?lock|lock_maker)\("(\w+)"\)""")


def test_the_order_of_the_table_is_allowed() -> None:
    locks = [lock_order.make(name) for name in lock_order.ranks()]
    for lock in locks:
        lock.acquire()
    for lock in locks:
        lock.release()


def test_every_other_order_raises_and_leaves_nothing_held() -> None:
    outer, inner = make_lock("agent"), make_lock("timers")
    with inner, pytest.raises(LockOrderError, match="agent is taken while timers is held"):
        outer.acquire()
    with inner, pytest.raises(LockOrderError):
        outer.acquire(blocking=False)
    with outer, inner:
        pass


def test_two_of_one_name_are_never_held_together() -> None:
    one, other = make_lock("client_connection"), make_lock("client_connection")
    with one, pytest.raises(LockOrderError):
        other.acquire()


def test_to_wait_for_oneself_raises_and_to_try_does_not() -> None:
    lock = make_lock("references")
    with lock:
        assert not lock.acquire(blocking=False)
        with pytest.raises(LockOrderError, match="would wait for itself"):
            lock.acquire()


def test_what_another_thread_holds_does_not_count() -> None:
    outer, inner = make_lock("agent"), make_lock("timers")
    taken = []
    with inner:
        thread = threading.Thread(target=lambda: taken.append(outer.acquire()))
        thread.start()
        thread.join()
    assert taken == [True]


def test_the_locks_of_this_process_know_their_order() -> None:
    from farprop.runtime.timers import TimerHeap

    assert isinstance(TimerHeap()._lock, OrderedLock)


def test_the_table_has_every_lock_and_no_other() -> None:
    source = Path(farprop.__file__).parent
    names = {name for path in source.rglob("*.py") for name in _MADE.findall(path.read_text())}
    assert names == set(lock_order.ranks())


def test_no_lock_is_made_without_a_name() -> None:
    source = Path(farprop.__file__).parent
    made = re.compile(r"\b(Lock|RLock|Condition)\(\)")
    unnamed = {path.name for path in source.rglob("*.py") if made.search(path.read_text())}
    assert unnamed == {"locks.py", "sync.py"}  # where they are made, and where they are events
