"""Waiting for another thread: the event is set before, during or after the wait begins."""

from __future__ import annotations

import threading

import pytest

from farprop.runtime.sync import OneShot, Waker


def test_one_shot_that_is_already_set_does_not_wait() -> None:
    event = OneShot()
    assert not event.wait(timeout=0.001)
    event.set()
    assert event.wait(timeout=0)


def test_setting_a_one_shot_twice_raises() -> None:
    event = OneShot()
    event.set()
    with pytest.raises(RuntimeError):
        event.set()


def test_one_shot_wakes_the_waiting_thread() -> None:
    event, woken = OneShot(), []
    thread = threading.Thread(target=lambda: woken.append(event.wait(timeout=10)))
    thread.start()
    event.set()
    thread.join()
    assert woken == [True]


def test_waker_can_be_reused_and_merges_unseen_wakes() -> None:
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
