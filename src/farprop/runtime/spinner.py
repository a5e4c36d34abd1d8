"""Spinning: asking again and again for a short time before a thread sleeps.

To be woken costs tens of microseconds, more than a message takes that is on its way already. Rules that hold here:

- A spinner learns how long its thread usually waits. It spins only if the next message is due soon, so workers without
  messages use no processor time.
- While it waits between two looks, it does not hold the interpreter's lock. A thread that released the lock for a
  moment and took it back at once would starve the other threads of the process.
- It gives way at every look: the message that it waits for may come from a process that waits for this very core. The
  kernel would let it spin for a whole slice, 3 ms, before that.
- It stops when the process or the machine has other work: a thread of the pool runs something, or this thread did not
  get its core back at once. Then all threads of the process rest: a thread that sleeps gets its core back sooner than
  one that has given way.
"""

from __future__ import annotations

import ctypes
import os
import time
import zlib
from collections.abc import Callable

# On a host with more workers than cores, a thread that spins takes the core of one that has work.
CROWDED_SECONDS = 400e-6
_LEAST_SECONDS = 100e-6
_PREEMPTED_SECONDS = 250e-6  # a look that takes longer was interrupted by other work
_LOST_SECONDS = 500e-6  # one that takes longer has cost more than a thread that sleeps loses
_BACK_OFF_SECONDS = 0.01
_CALM_SECONDS = 0.005  # of spinning, after which a machine does not count as busy any more
_LONGEST_REST_SECONDS = 0.64
_LONG_SECONDS = 0.004  # longer waits count as this one, so that a worker that was idle spins again after a few messages
_LEARNING = 0.25
CROWDED = 1 << 30  # a number of workers that no host has cores for
# Its checksum takes about three microseconds. Zlib computes it without the interpreter's lock.
_NOISE = bytes(8 * 1024)

_now = time.monotonic
_pause = zlib.crc32
_give_way = ctypes.CDLL(None).sched_yield  # not os.sched_yield, which may keep the interpreter's lock

Events = list[tuple[int, int]]


class Activity:
    """What all spinners of a process have to know.

    ``running`` threads of the pool run something, and don't wait. ``spin_seconds`` is for how long a thread may spin; 0
    for not at all. With a single core no thread spins. Until ``rests_until`` none does, and until ``brief_until`` only
    for a moment.
    """

    __slots__ = ("_busy_until", "_rest", "brief_until", "rests_until", "running", "spin_seconds")

    def __init__(self) -> None:
        self.running = 0
        self.spin_seconds = 0.0
        self.brief_until = self.rests_until = self._busy_until = 0.0
        self._rest = _BACK_OFF_SECONDS
        self.set_limit(CROWDED_SECONDS, CROWDED)

    def set_limit(self, seconds: float, workers: int) -> None:
        """Set ``spin_seconds``, for so many workers on this host."""
        cores = len(os.sched_getaffinity(0))
        self.spin_seconds = 0.0 if cores < 2 else seconds if workers <= cores else min(seconds, CROWDED_SECONDS)

    def on_preempted(self, now: float, lost: float) -> None:
        """Other work has had the core of a thread that spun. If that goes on, all threads rest, longer and longer."""
        if now > self._busy_until:
            self._rest = _BACK_OFF_SECONDS
        elif lost > _LOST_SECONDS:
            self._rest = min(2 * self._rest, _LONGEST_REST_SECONDS)
            self.rests_until = now + self._rest
        self.brief_until = max(now + _BACK_OFF_SECONDS, self.rests_until)
        self._busy_until = self.brief_until + _CALM_SECONDS


class Spinner:
    """Waits for one source of messages."""

    __slots__ = ("_expected", "_spun")

    def __init__(self) -> None:
        self._expected = _LEAST_SECONDS  # how long a wait usually takes, in seconds
        self._spun = 0.0  # for how long the last ``poll`` has spun in vain

    def poll(self, poll: Callable[[int], Events], activity: Activity) -> Events:
        """What ``poll(0)`` reports while it spins; nothing if the next message is not due soon."""
        limit = activity.spin_seconds
        self._spun = 0.0
        if self._expected >= limit:
            return poll(0)
        looked = began = _now()
        if began < activity.rests_until:
            return poll(0)
        if began < activity.brief_until:
            end = began + _LEAST_SECONDS
        else:
            end = began + min(limit, 2 * self._expected + _LEAST_SECONDS)
        while True:
            events = poll(0)
            if events:
                self._expected += _LEARNING * (looked - began - self._expected)
                return events
            if activity.running:
                return events
            _pause(_NOISE)
            _give_way()
            now = _now()
            self._spun = now - began
            if now - looked > _PREEMPTED_SECONDS:
                activity.on_preempted(now, now - looked)
                return events
            if now > end:
                return events
            looked = now

    def slept(self, seconds: float) -> None:
        """After ``poll`` found nothing, its thread has slept for so long until there was a message."""
        self._expected += _LEARNING * (min(self._spun + seconds, _LONG_SECONDS) - self._expected)
