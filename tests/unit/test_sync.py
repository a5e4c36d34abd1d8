"""Waiting for another thread: the event is set before, during or after the wait begins."""

from __future__ import annotations

import threading

import pytest

from farprop.runtime.sync import OneShot, Waker


def test_a_one_shot_that_was_set_before_does_not_wait() -> None:
    event = OneShot()
    assert not event.wait(timeout=0.001)
    event.set()
    assert event.wait(timeout=0)


def test_a_one_shot_is_set_once() -> None:
    event = OneShot()
    event.set()
    with pytest.raises(RuntimeError):
        event.set()


def test_a_one_shot_wakes_the_thread_that_waits() -> None:
    event, woken = OneShot(), []
    thread = threading.Thread(target=lambda: woken.append(event.wait(timeout=10)))
    thread.start()
    event.set()
    thread.join()
    assert woken == [True]


def test_a_waker_wakes_again_and_again_and_counts_what_nobody_saw_as_one() -> None:
    waker = Waker()
    for _ in range(3):
        assert not waker.wait(timeout=0)
        waker.wake()
        waker.wake()
        assert waker.wait(timeout=0)
    assert not waker.wait(timeout=0.001)


def test_no_wake_is_lost_between_two_threads() -> None:
    turns = 2000
    ping, pong = Waker(), Waker()

    def answer() -> None:
        for _ in range(turns):
            ping.wait()
            pong.wake()

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(turns):
        ping.wake()
        assert pong.wait(timeout=10)
    thread.join()
