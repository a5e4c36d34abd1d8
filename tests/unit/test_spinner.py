"""When a waiting thread spins, and when it stops. Time is simulated."""

from __future__ import annotations

import pytest

from farprop.runtime import spinner
from farprop.runtime.spinner import CROWDED, CROWDED_SECONDS, Activity, Spinner

LOOK = 5e-6


class Clock:
    """Each look at the source takes ``look`` seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self.look = LOOK
        self.message_at: float | None = None
        self.looks = 0

    def pause(self, _: bytes) -> None:
        self.now += self.look

    def poll(self, _: int) -> list[tuple[int, int]]:
        self.looks += 1
        return [(0, 1)] if self.message_at is not None and self.now >= self.message_at else []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(spinner, "_now", lambda: made.now)
    monkeypatch.setattr(spinner, "_pause", made.pause)
    return made


def activity(limit: float = 0.002) -> Activity:
    made = Activity()
    made.spin_seconds = limit
    return made


def wait(spin: Spinner, clock: Clock, activity: Activity, seconds: float) -> bool:
    """Wait for a message that comes after so many seconds; returns whether spinning found it."""
    began = clock.now
    clock.message_at = began + seconds
    found = bool(spin.poll(clock.poll, activity))
    if not found:
        before = clock.now
        clock.now = max(clock.now, clock.message_at)
        spin.slept(clock.now - before)
    clock.message_at = None
    return found


def test_waits_that_are_usually_short_are_spun_through(clock: Clock) -> None:
    spin, busy = Spinner(), activity()
    found = [wait(spin, clock, busy, 0.0008) for _ in range(30)]
    assert not found[0]
    assert all(found[10:])


def test_rare_messages_are_slept_for(clock: Clock) -> None:
    spin, busy = Spinner(), activity()
    for _ in range(10):
        wait(spin, clock, busy, 0.5)
    clock.looks = 0
    assert not wait(spin, clock, busy, 0.5)
    assert clock.looks == 1


def test_after_a_long_pause_a_few_messages_are_enough(clock: Clock) -> None:
    spin, busy = Spinner(), activity()
    for _ in range(10):
        wait(spin, clock, busy, 100.0)
    found = [wait(spin, clock, busy, 0.0002) for _ in range(8)]
    assert found[-1]


def test_running_thread_of_the_pool_ends_it(clock: Clock) -> None:
    spin, busy = Spinner(), activity()
    busy.running = 1
    clock.message_at = clock.now + 50e-6
    assert spin.poll(clock.poll, busy) == []
    assert clock.looks == 1


def test_message_that_is_there_is_found_though_threads_run(clock: Clock) -> None:
    spin, busy = Spinner(), activity()
    busy.running = 1
    clock.message_at = clock.now
    assert spin.poll(clock.poll, busy) == [(0, 1)]


def test_busy_machine_shortens_it_for_a_while(clock: Clock) -> None:
    spin, busy = Spinner(), activity()
    for _ in range(30):
        wait(spin, clock, busy, 0.0005)
    assert wait(spin, clock, busy, 0.0005)
    clock.look = 0.001  # another process has the core
    assert not wait(spin, clock, busy, 0.0015)
    clock.look = LOOK
    assert not wait(spin, clock, busy, 0.0005)
    clock.now += 1.0
    assert wait(spin, clock, busy, 0.0005)


def _spins_lost_in(seconds: float, clock: Clock, busy: Activity) -> int:
    """Wait for messages on a machine whose cores others want; returns how often a spinning thread lost its core."""
    spin, lost, end = Spinner(), 0, clock.now + seconds
    clock.look = 0.003  # another process has the core meanwhile
    while clock.now < end:
        rested_until = busy.rests_until
        wait(spin, clock, busy, 0.0005)
        lost += busy.rests_until != rested_until
    return lost


def test_on_a_busy_machine_all_threads_rest_for_longer_and_longer(clock: Clock) -> None:
    busy = activity()
    assert 5 < _spins_lost_in(2.0, clock, busy) < 15
    assert 10 < _spins_lost_in(10.0, clock, busy) < 20
    clock.now += 5.0  # without any messages
    # The machine may be busy for a moment only.
    assert 2 < _spins_lost_in(0.1, clock, busy) < 6


def test_limit_of_zero_means_not_at_all(clock: Clock) -> None:
    spin = Spinner()
    clock.message_at = 1.0
    assert spin.poll(clock.poll, activity(0.0)) == []
    assert clock.looks == 1


def test_limit_depends_on_the_workers_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spinner.os, "sched_getaffinity", lambda _: {0, 1, 2})
    made = Activity()
    made.set_limit(0.002, 3)
    assert made.spin_seconds == 0.002
    made.set_limit(0.002, 4)
    assert made.spin_seconds == CROWDED_SECONDS
    made.set_limit(0.0001, CROWDED)
    assert made.spin_seconds == 0.0001
    monkeypatch.setattr(spinner.os, "sched_getaffinity", lambda _: {0})
    made.set_limit(0.002, 1)
    assert made.spin_seconds == 0.0
