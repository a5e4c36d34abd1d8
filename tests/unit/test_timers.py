"""The timer heap against a sorted list, with a fake clock."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest

from farprop.runtime.timers import TimerHandle, TimerHeap


class Model:
    """The reference implementation: a list that is sorted at each access."""

    def __init__(self) -> None:
        self.waiting: list[tuple[float, int]] = []
        self.ran: list[int] = []

    def run_due(self, now: float) -> None:
        due = sorted(entry for entry in self.waiting if entry[0] <= now)
        self.waiting = [entry for entry in self.waiting if entry[0] > now]
        self.ran += [number for _, number in due]


def test_heap_agrees_with_a_sorted_list() -> None:
    for seed in range(5000):
        _run_schedule(random.Random(seed))


def _run_schedule(chance: random.Random) -> None:
    heap, model = TimerHeap(), Model()
    ran: list[int] = []
    handles: dict[int, TimerHandle] = {}
    now = 0.0
    # Some schedules cancel nearly all of their timers, like calls that are answered before their deadline.
    weights = chance.choice([(4, 1, 1, 2), (6, 1, 6, 1), (3, 3, 1, 3)])
    for number in range(chance.randrange(1, 150)):
        action = chance.choices(("set", "lockfree", "cancel", "run"), weights)[0]
        # No two timers at one time: their order is not defined.
        when = now + chance.random() * 10 - 1 + number * 1e-9
        if action == "set":
            handles[number] = heap.call_at(when, lambda number=number: ran.append(number))
            model.waiting.append((when, number))
        elif action == "lockfree":
            heap.call_at_lockfree(when, lambda number=number: ran.append(number))
            model.waiting.append((when, number))
        elif action == "cancel" and handles:
            victim = chance.choice(list(handles))
            waits = any(other == victim for _, other in model.waiting)
            assert handles.pop(victim).cancel() == waits
            model.waiting = [entry for entry in model.waiting if entry[1] != victim]
        else:
            now += chance.random() * 5
            heap.run_due(now)
            model.run_due(now)
        heap.sort_in()
        heap.validate()
        assert ran == model.ran
        assert len(heap) == len(model.waiting)
        if model.waiting:
            assert heap.next_deadline is not None
            assert heap.next_deadline <= min(model.waiting)[0]
    heap.run_due(1e9)
    model.run_due(1e9)
    assert ran == model.ran
    assert heap.next_deadline is None
    assert len(heap) == 0


def test_timer_runs_once_and_cannot_be_cancelled_afterwards() -> None:
    heap = TimerHeap()
    ran: list[float] = []
    handle = heap.call_at(1.0, lambda: ran.append(1.0))
    heap.run_due(0.9)
    assert not ran
    heap.run_due(1.0)
    heap.run_due(2.0)
    assert ran == [1.0]
    assert not handle.cancel()


def test_cancelled_timers_do_not_accumulate_or_keep_objects_alive() -> None:
    class Owner:
        def callback(self) -> None: ...

    heap = TimerHeap()
    owner = Owner()
    seen = weakref.ref(owner)
    for number in range(10_000):
        heap.call_at(1e6 + number, owner.callback).cancel()
    assert len(heap._heap) <= 65
    del owner
    gc.collect()
    assert seen() is None


def test_exception_in_a_callback_is_logged_and_other_timers_run(caplog: pytest.LogCaptureFixture) -> None:
    heap = TimerHeap()
    ran: list[int] = []
    heap.call_at(1.0, lambda: [][0])
    heap.call_at(2.0, lambda: ran.append(2))
    heap.run_due(3.0)
    assert ran == [2]
    assert "unexpected error in a timer" in caplog.text


def test_callbacks_run_without_the_lock() -> None:
    """Callbacks may set and cancel timers. Timers that are due at once run the next time."""
    heap = TimerHeap()
    ran: list[str] = []
    other = heap.call_at(5.0, lambda: ran.append("other"))

    def first() -> None:
        ran.append("first")
        assert other.cancel()
        heap.call_at(0.0, lambda: ran.append("second"))

    heap.call_at(1.0, first)
    heap.run_due(1.0)
    assert ran == ["first"]
    heap.run_due(1.0)
    heap.run_due(10.0)
    assert ran == ["first", "second"]


def test_call_at_lockfree_works_while_the_lock_is_held() -> None:
    """A finaliser may run on a thread that holds the lock of the heap."""
    heap = TimerHeap()
    ran: list[int] = []
    with heap._lock:
        heap.call_at_lockfree(1.0, lambda: ran.append(1))
    heap.run_due(1.0)
    assert ran == [1]


def test_timers_set_and_cancelled_by_several_threads() -> None:
    heap = TimerHeap()
    ran: list[int] = []
    expected: list[int] = []
    ended = threading.Event()

    def work(first: int) -> None:
        chance = random.Random(first)
        for number in range(first, first + 2000):
            handle = heap.call_at(chance.random(), lambda number=number: ran.append(number))
            if chance.random() < 0.5 and handle.cancel():
                continue
            expected.append(number)

    def run() -> None:
        while not ended.is_set():
            heap.run_due(random.random())

    threads = [threading.Thread(target=work, args=(k * 10_000,)) for k in range(4)]
    runner = threading.Thread(target=run)
    for thread in (runner, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ended.set()
    runner.join()
    heap.run_due(2.0)
    assert sorted(ran) == sorted(expected)
    heap.validate()
