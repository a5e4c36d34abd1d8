"""Callbacks that are due at a time of the monotonic clock: one heap for a whole worker.

Rules that hold here:

- Any thread may add and cancel timers. One thread at a time runs those that are due, without the lock.
- A timer runs at most once, and not after ``cancel`` has returned True.
- ``next_deadline`` is never later than the earliest timer. It may be earlier: a cancelled timer stays in the heap until
  its time comes, or until most of the heap is cancelled.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable

from farprop.locks import make_lock

_log = logging.getLogger(__name__)

_FEW = 64  # a heap that is not longer is not searched for cancelled timers

Callback = Callable[[], None]


class TimerHandle:
    """A timer that was set. ``when`` is when it is due."""

    __slots__ = ("_callback", "_heap", "when")

    def __init__(self, heap: TimerHeap, when: float, callback: Callback) -> None:
        self.when = when
        self._callback: Callback | None = callback
        self._heap = heap

    def cancel(self) -> bool:
        """Keep it from running.

        Returns:
            True if it has not run and will not; False if it has run, runs now, or was cancelled before.
        """
        return self._heap._cancel(self)


class TimerHeap:
    """See the module's rules. It reads no clock: times are the caller's."""

    def __init__(self) -> None:
        self.next_deadline: float | None = None  # read without the lock by the thread that sleeps until then
        self._lock = make_lock("timers")
        # The numbers decide between equal times. To compare such tuples runs no Python code, so an interrupt can't
        # leave the heap half sorted.
        self._heap: list[tuple[float, int, TimerHandle]] = []
        self._numbers = itertools.count()
        self._cancelled = 0  # how many in the heap are
        self._unsorted: deque[TimerHandle] = deque()  # added without the lock, not in the heap yet

    def __len__(self) -> int:
        """How many timers wait."""
        return len(self._heap) - self._cancelled + len(self._unsorted)

    def call_at(self, when: float, callback: Callback) -> TimerHandle:
        """Have ``callback()`` called at ``when``, or soon after.

        Returns:
            A handle that can cancel it.
        """
        handle = TimerHandle(self, when, callback)
        entry = when, next(self._numbers), handle
        with self._lock:
            # Before the timer is there: an interrupt may leave it too early, but not too late.
            if self.next_deadline is None or when < self.next_deadline:
                self.next_deadline = when
            heapq.heappush(self._heap, entry)
        return handle

    def call_at_lockfree(self, when: float, callback: Callback) -> None:
        """As ``call_at``, for the garbage collector, which may run inside of ``call_at`` and so takes no lock.
        Whoever sleeps until ``next_deadline`` must be woken afterwards, and then call ``sort_in``.
        """
        self._unsorted.append(TimerHandle(self, when, callback))

    def sort_in(self) -> None:
        """Take in what was added without the lock."""
        while self._unsorted:
            with self._lock:
                try:
                    handle = self._unsorted.popleft()
                except IndexError:
                    return
                heapq.heappush(self._heap, (handle.when, next(self._numbers), handle))
                self.next_deadline = self._heap[0][0]

    def run_due(self, now: float) -> None:
        """Run all timers that are due at ``now``, the earliest first. What a callback raises is logged."""
        self.sort_in()
        for callback in self._take_due(now):
            try:
                callback()
            except Exception:
                _log.exception("farprop: unexpected error in a timer")

    def _take_due(self, now: float) -> list[Callback]:
        due: list[Callback] = []
        with self._lock:
            heap = self._heap
            while heap and heap[0][0] <= now:
                handle = heapq.heappop(heap)[2]
                if handle._callback is None:
                    self._cancelled -= 1
                else:
                    due.append(handle._callback)
                    handle._callback = None
            self.next_deadline = heap[0][0] if heap else None
        return due

    def _cancel(self, handle: TimerHandle) -> bool:
        with self._lock:
            callback, handle._callback = handle._callback, None
            if callback is None:
                return False
            self._cancelled += 1
            if len(self._heap) > _FEW and 2 * self._cancelled > len(self._heap):
                heap = [entry for entry in self._heap if entry[2]._callback is not None]
                heapq.heapify(heap)
                self._heap, self._cancelled = heap, 0
                self.next_deadline = heap[0][0] if heap else None
        return True

    def validate(self) -> None:
        """Raise if an invariant does not hold."""
        with self._lock:
            heap = self._heap
            assert all(heap[(at - 1) // 2][0] <= heap[at][0] for at in range(1, len(heap)))
            assert self._cancelled == sum(handle._callback is None for _, _, handle in heap)
            assert not heap or (self.next_deadline is not None and self.next_deadline <= heap[0][0])
