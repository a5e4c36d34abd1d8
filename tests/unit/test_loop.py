"""The loop's threads: the baton, the limit, waiting, alarms."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from farprop.runtime.loop import IN, Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop("test", 3)
    made.start(lambda now: 0.0, lambda: None)
    yield made
    made.close(5.0)


class Source:
    """A pipe whose bytes become requests."""

    def __init__(self, loop: Loop) -> None:
        self.read, self.write = os.pipe()
        os.set_blocking(self.read, False)
        self.loop = loop
        self.todo: list[object] = []
        loop.add(self.read, IN, self.on_input)

    def on_input(self, _: int) -> None:
        for _byte in os.read(self.read, 1000):
            function = self.todo.pop(0)
            self.loop.push_request(function)  # type: ignore[arg-type]

    def request(self, *functions: object) -> None:
        self.todo += functions
        os.write(self.write, b"." * len(functions))

    def close(self) -> None:
        self.loop.remove(self.read)
        os.close(self.read)
        os.close(self.write)


@pytest.fixture
def source(loop: Loop) -> Iterator[Source]:
    made = Source(loop)
    yield made
    made.close()


def test_a_short_request_runs_on_the_thread_that_read_it(loop: Loop, source: Source) -> None:
    held: list[bool] = []
    done = threading.Event()

    def request() -> None:
        held.append(loop.holds_baton())
        done.set()

    source.request(request)
    assert done.wait(10)
    assert held == [True]


def test_a_slow_request_loses_the_baton_and_others_are_read(loop: Loop, source: Source) -> None:
    gate, second = threading.Event(), threading.Event()
    source.request(lambda: gate.wait(20))
    source.request(second.set)
    assert second.wait(10)
    gate.set()


def test_the_limit_holds_and_waiting_does_not_count(loop: Loop, source: Source) -> None:
    gate, reached = threading.Event(), threading.Semaphore(0)
    fourth = threading.Event()

    def slow() -> None:
        reached.release()
        gate.wait(20)

    def waiting() -> None:
        with loop.blocked():
            reached.release()
            gate.wait(20)

    source.request(slow, slow, waiting, slow)
    for _ in range(4):
        assert reached.acquire(timeout=10)
    source.request(fourth.set)
    assert not fourth.wait(0.05)
    assert loop.facts()["running"] == 3
    gate.set()
    assert fourth.wait(10)


def test_leading_while_waiting_leaves_requests_to_others(loop: Loop, source: Source) -> None:
    flag: list[int] = []
    finished = threading.Event()
    outcome: list[bool] = []
    woke = os.pipe()

    def on_wake(_: int) -> None:
        flag.append(len(os.read(woke[0], 1)))

    def nested() -> None:
        loop.add(woke[0], IN, on_wake)
        outcome.append(loop.lead_until(lambda: bool(flag), time.monotonic() + 10))
        loop.remove(woke[0])
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


def test_lead_until_stops_at_its_deadline(loop: Loop, source: Source) -> None:
    outcome: list[bool] = []
    done = threading.Event()

    def nested() -> None:
        outcome.append(loop.lead_until(lambda: False, time.monotonic() + 0.05))
        done.set()

    source.request(nested)
    assert done.wait(10)
    assert outcome == [False]


def test_an_alarm_rings_and_a_nearer_one_first() -> None:
    rung = threading.Event()
    loop = Loop("alarm", 1)

    def on_alarm(now: float) -> float:
        rung.set()
        return 0.0

    loop.start(on_alarm, lambda: None)
    loop.set_alarm(time.monotonic() + 1000)
    loop.set_alarm(time.monotonic() + 0.02)
    assert rung.wait(10)
    loop.close(5.0)


def test_a_handler_that_raises_is_dropped_and_the_loop_goes_on(loop: Loop, source: Source) -> None:
    pipe = os.pipe()

    def broken(_: int) -> None:
        raise ZeroDivisionError

    loop.add(pipe[0], IN, broken)
    os.write(pipe[1], b".")
    done = threading.Event()
    source.request(done.set)
    assert done.wait(10)
    os.close(pipe[0])
    os.close(pipe[1])


def test_what_was_submitted_runs_even_when_the_loop_closes() -> None:
    loop = Loop("last", 1)
    loop.start(lambda now: 0.0, lambda: None)
    ran: list[int] = []
    for i in range(100):
        loop.submit(ran.append, i)
    loop.close(5.0)
    assert sorted(ran) == list(range(100))


def test_many_requests_from_many_turns_all_run_once(loop: Loop, source: Source) -> None:
    ran: list[int] = []
    done = threading.Event()

    def note(i: int) -> None:
        if i % 50 == 0:
            time.sleep(0.002)  # long enough to lose the baton
        ran.append(i)
        if len(ran) == 2000:
            done.set()

    for i in range(2000):
        source.request(lambda i=i: note(i))
    assert done.wait(30)
    assert sorted(ran) == list(range(2000))
