"""The thread pool and its event loop: the polling thread, the limit, blocked threads, timers."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farprop.runtime.event_loop import IN, EventLoop
from farprop.runtime.thread_pool import ThreadPool


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    made = ThreadPool("test", 3, EventLoop())
    made.start()
    yield made
    made.close(5.0)


@pytest.fixture
def loop(pool: ThreadPool) -> EventLoop:
    return pool.loop


class Source:
    """A pipe whose bytes become requests."""

    def __init__(self, pool: ThreadPool) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.pool = pool
        self.todo: list[object] = []
        pool.loop.add(self.read, IN, self.on_input)

    def on_input(self, _: int) -> None:
        for _byte in os.read(self.read, 1000):
            function = self.todo.pop(0)
            self.pool.push_request((0, function, ()))  # type: ignore[arg-type]

    def request(self, *functions: object) -> None:
        self.todo += functions
        os.write(self.write, b"." * len(functions))

    def close(self) -> None:
        self.pool.loop.remove(self.read)
        os.close(self.read)
        os.close(self.write)


@pytest.fixture
def source(pool: ThreadPool) -> Iterator[Source]:
    made = Source(pool)
    yield made
    made.close()


def test_short_request_runs_on_the_thread_that_read_it(pool: ThreadPool, source: Source) -> None:
    held: list[bool] = []
    done = threading.Event()

    def request() -> None:
        held.append(pool.is_polling_thread())
        done.set()

    source.request(request)
    assert done.wait(10)
    assert held == [True]


def test_slow_request_does_not_stop_reading(pool: ThreadPool, source: Source) -> None:
    gate, second = threading.Event(), threading.Event()
    source.request(lambda: gate.wait(20))
    source.request(second.set)
    assert second.wait(10)
    gate.set()


def test_blocked_requests_do_not_count_towards_the_limit(pool: ThreadPool, source: Source) -> None:
    gate, reached = threading.Event(), threading.Semaphore(0)
    fourth = threading.Event()

    def slow() -> None:
        reached.release()
        gate.wait(20)

    def waiting() -> None:
        with pool.blocked():
            reached.release()
            gate.wait(20)

    source.request(slow, slow, waiting, slow)
    for _ in range(4):
        assert reached.acquire(timeout=10)
    source.request(fourth.set)
    assert not fourth.wait(0.05)
    assert pool.facts()["running"] == 3
    gate.set()
    assert fourth.wait(10)


def test_poll_until_leaves_requests_to_other_threads(pool: ThreadPool, source: Source) -> None:
    flag: list[int] = []
    finished = threading.Event()
    outcome: list[bool] = []
    woke = os.pipe()

    def on_wake(_: int) -> None:
        flag.append(len(os.read(woke[0], 1)))

    def nested() -> None:
        pool.loop.add(woke[0], IN, on_wake)
        is_done = pool.poll_until(lambda: bool(flag), time.monotonic() + 10)
        pool.loop.remove(woke[0])
        if not is_done and not pool.is_polling_thread():
            source.request(nested)  # on a busy machine the watcher has made another thread the leader
            return
        outcome.append(is_done)
        finished.set()

    other = threading.Event()
    source.request(nested)
    source.request(other.set)
    assert other.wait(10)
    os.write(woke[1], b".")
    assert finished.wait(10)
    assert outcome == [True]
    os.close(woke[0])
    os.close(woke[1])


def test_poll_until_stops_at_its_deadline(pool: ThreadPool, source: Source) -> None:
    outcome: list[bool] = []
    done = threading.Event()

    def nested() -> None:
        outcome.append(pool.poll_until(lambda: False, time.monotonic() + 0.05))
        done.set()

    source.request(nested)
    assert done.wait(10)
    assert outcome == [False]


def test_earlier_timer_wakes_the_sleeping_loop(loop: EventLoop) -> None:
    ran = threading.Event()
    sleeps = threading.Event()
    loop.on_pause = sleeps.set
    loop.call_at(time.monotonic() + 1000, lambda: None)
    assert sleeps.wait(10)
    loop.call_at(time.monotonic() + 0.02, ran.set)
    assert ran.wait(10)


def test_lockfree_timer_wakes_the_loop(loop: EventLoop) -> None:
    ran = threading.Event()
    sleeps = threading.Event()
    loop.on_pause = sleeps.set
    loop.wake()
    assert sleeps.wait(10)
    loop.call_at_lockfree(time.monotonic() + 0.02, ran.set)
    assert ran.wait(10)


def test_timer_set_by_a_timer_runs(loop: EventLoop) -> None:
    ran = threading.Event()
    loop.call_at(time.monotonic(), lambda: loop.call_at(time.monotonic() + 0.02, ran.set) and None)
    assert ran.wait(10)


def test_timer_that_raises_does_not_stop_the_loop(loop: EventLoop, caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Event()

    def broken() -> None:
        raise ZeroDivisionError

    loop.call_at(time.monotonic(), broken)
    loop.call_at(time.monotonic() + 0.02, ran.set)
    assert ran.wait(10)
    assert "unexpected error in a timer" in caplog.text


def test_handler_that_raises_is_removed_and_the_loop_continues(pool: ThreadPool, source: Source) -> None:
    pipe = os.pipe()

    def broken(_: int) -> None:
        raise ZeroDivisionError

    pool.loop.add(pipe[0], IN, broken)
    os.write(pipe[1], b".")
    done = threading.Event()
    source.request(done.set)
    assert done.wait(10)
    os.close(pipe[0])
    os.close(pipe[1])


def test_submitted_jobs_run_even_when_the_pool_closes() -> None:
    pool = ThreadPool("last", 1, EventLoop())
    pool.start()
    ran: list[int] = []
    for i in range(100):
        pool.submit(ran.append, i)
    pool.close(5.0)
    assert sorted(ran) == list(range(100))


def test_many_answers_at_once_do_not_start_a_thread_each(pool: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads begin slowly if many want the interpreter's lock, and so does what counts those that have begun."""
    begin, done = threading.Event(), threading.Semaphore(0)
    run = pool._run_answers

    def run_later(*args: Any) -> None:
        begin.wait()
        run(*args)

    monkeypatch.setattr(pool, "_run_answers", run_later)
    for _ in range(300):
        pool.submit(done.release)
    assert pool.facts()["threads"] <= 40
    begin.set()
    for _ in range(300):
        assert done.acquire(timeout=10)


def test_answers_that_wait_make_room_for_others(pool: ThreadPool) -> None:
    last, done = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        with pool.blocked():
            last.wait()
        done.release()

    for _ in range(100):
        pool.submit(wait)
    pool.submit(last.set)
    for _ in range(100):
        assert done.acquire(timeout=10)


def test_peers_take_turns() -> None:
    """Each peer's requests run in order, whatever the others have queued."""
    pool = ThreadPool("test", 1, EventLoop())
    ran: list[tuple[int, int]] = []
    done = threading.Event()
    counts = {1: 1000, 2: 3, 3: 40}
    for peer, count in counts.items():
        for number in range(count):
            pool.push_request((peer, ran.append, ((peer, number),)))
    pool.push_request((1, done.set, ()))
    pool.start()
    assert done.wait(10)
    pool.close(5.0)
    for peer, count in counts.items():
        assert [number for by, number in ran if by == peer] == list(range(count))
    assert ran.index((2, 2)) < 20
    assert ran.index((3, 39)) < 120


def test_a_peer_that_comes_later_does_not_wait_for_a_flood() -> None:
    pool = ThreadPool("test", 1, EventLoop())
    ran: list[str] = []
    done = threading.Event()

    def flood(number: int) -> None:
        ran.append("flood")
        if number == 100:
            pool.submit_request((2, ran.append, ("ping",)))
        if number == 1000:
            done.set()

    for number in range(1001):
        pool.push_request((1, flood, (number,)))
    pool.start()
    assert done.wait(10)
    pool.close(5.0)
    assert len(ran) == 1002
    assert ran.index("ping") < 120


def test_many_requests_each_run_once(pool: ThreadPool, source: Source) -> None:
    ran: list[int] = []
    done = threading.Event()

    def note(i: int) -> None:
        while i % 50 == 0 and pool.is_polling_thread():
            os.sched_yield()  # until the watcher has made another thread the leader
        ran.append(i)
        if len(ran) == 2000:
            done.set()

    for i in range(2000):
        source.request(lambda i=i: note(i))
    assert done.wait(30)
    assert sorted(ran) == list(range(2000))


def _until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_two_threads_that_see_the_same_free_place_run_one_request() -> None:
    """One has read the requests, the other was woken for them."""
    pool = ThreadPool("test", 1, EventLoop())
    source = Source(pool)
    pool.start()
    gate, begun = threading.Event(), threading.Semaphore(0)

    def request() -> None:
        begun.release()
        gate.wait(20)

    def takes_a_request(thread: int | None) -> bool:
        frame = sys._current_frames().get(thread or 0)
        return any(at.f_code is ThreadPool._run_request.__code__ for at, _ in traceback.walk_stack(frame))

    source.request(lambda: _until(lambda: not pool.is_polling_thread()))  # so there are two threads
    _until(lambda: bool(pool._idle) and not pool._coming)
    with pool._lock:
        leader = pool._leader
        source.request(request, request)
        _until(lambda: takes_a_request(leader))
        thread, woken = pool._idle.popitem()  # as ``recruit`` does
        pool._coming += 1
        woken.set()
        _until(lambda: takes_a_request(thread))
    assert begun.acquire(timeout=10)
    # The other thread has given up, or has begun the second one.
    _until(lambda: takes_a_request(leader) != takes_a_request(thread) or pool._running > 1)
    assert pool.facts()["running"] == 1
    assert pool.facts()["queued"] == 1
    gate.set()
    assert begun.acquire(timeout=10)
    source.close()
    pool.close(5.0)
