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


def test_other_orders_raise_and_leave_no_lock_held() -> None:
    outer, inner = make_lock("agent"), make_lock("timers")
    with inner, pytest.raises(LockOrderError, match="agent is taken while timers is held"):
        outer.acquire()
    with inner, pytest.raises(LockOrderError):
        outer.acquire(blocking=False)
    with outer, inner:
        pass


def test_two_locks_of_one_name_cannot_be_held_together() -> None:
    one, other = make_lock("client_connection"), make_lock("client_connection")
    with one, pytest.raises(LockOrderError):
        other.acquire()


def test_blocking_acquire_of_a_held_lock_raises_and_nonblocking_does_not() -> None:
    lock = make_lock("references")
    with lock:
        assert not lock.acquire(blocking=False)
        with pytest.raises(LockOrderError, match="would wait for itself"):
            lock.acquire()


def test_locks_held_by_other_threads_do_not_count() -> None:
    outer, inner = make_lock("agent"), make_lock("timers")
    taken = []
    with inner:
        thread = threading.Thread(target=lambda: taken.append(outer.acquire()))
        thread.start()
        thread.join()
    assert taken == [True]


def test_order_is_checked_in_this_process() -> None:
    from farprop.runtime.timers import TimerHeap

    assert isinstance(TimerHeap()._lock, OrderedLock)


def test_table_lists_exactly_the_locks_of_the_source() -> None:
    source = Path(farprop.__file__).parent
    names = {name for path in source.rglob("*.py") for name in _MADE.findall(path.read_text())}
    assert names == set(lock_order.ranks())


def test_no_lock_is_created_without_a_name() -> None:
    source = Path(farprop.__file__).parent
    made = re.compile(r"\b(Lock|RLock|Condition)\(\)")
    unnamed = {path.name for path in source.rglob("*.py") if made.search(path.read_text())}
    assert unnamed == {"locks.py", "sync.py"}  # the one makes named locks, the other uses locks as events
