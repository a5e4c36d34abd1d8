"""What this worker has done of late, for whoever looks on: sums of its calls, and its last events.

It listens to events from the first question on, and until nobody has asked for ``LEASE_SECONDS``. So whoever asks may
go away without a word.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from farprop.locks import make_lock
from farprop.protocol.call_stats import CallStats
from farprop.protocol.events import Event, Span, discreet
from farprop.protocol.inspection import Member, Recent
from farprop.runtime.recorder import LateEvent, recorder

LEASE_SECONDS = 10.0
_MOST_EVENTS = 2000
_MOST_RECORDS = 1000  # that wait for the next question to be summed up
_now = time.monotonic


class RecentWork:
    """Methods may be called from any thread.

    Args:
        call_at: calls a function at a time.
        submit: runs a function on another thread.
    """

    def __init__(
        self,
        call_at: Callable[[float, Callable[[], None]], object],
        submit: Callable[[Callable[[], None]], None],
    ) -> None:
        self._call_at = call_at
        self._submit = submit
        self._lock = make_lock("recent_work")
        self._unsubscribe: Callable[[], None] | None = None
        self._asked = 0.0
        self._since = 0.0
        self._stats = CallStats()
        self._events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._count = 0  # of all events since it began to listen
        self._records: deque[LateEvent] = deque()  # that were not summed up yet
        self._is_summing = False

    def since(self, cursor: int, member: Member, is_discreet: bool) -> Recent:
        """What was done since an earlier question.

        Args:
            cursor: the one in the answer to that question; 0 for the first.
            member: this worker.
            is_discreet: whether to leave out what workers of a restricted job don't tell each other.
        """
        self._listen()
        self._sum_up()
        with self._lock:
            count = self._count
            if cursor > count:  # it has begun anew since then
                cursor = 0
            wanted = count - cursor
            events = list(self._events)[-wanted:] if wanted else []
            rows = [row.copy() for row in self._stats.rows()]
        missing = wanted - len(events)
        if is_discreet:
            events = [discreet(event) for event in events]
        return Recent(member, _now(), time.time(), self._since, count, missing, events, rows)

    def _listen(self) -> None:
        with self._lock:
            self._asked = now = _now()
            if self._unsubscribe is not None:
                return
            self._since = now
            self._stats = CallStats()
            self._events.clear()
            self._count = 0
            self._unsubscribe = recorder.subscribe_late(self._on_record)
        self._call_at(now + LEASE_SECONDS, self._look)

    def _on_record(self, record: LateEvent) -> None:
        # Nothing more on the path of a call: to sum it up takes as long as the rest of recording it.
        self._records.append(record)
        if len(self._records) >= _MOST_RECORDS and not self._is_summing:
            self._is_summing = True
            self._submit(self._sum_up)

    def _sum_up(self) -> None:
        """Make events of what was recorded."""
        with self._lock:
            self._is_summing = False
            for _ in range(len(self._records)):
                event = self._records.popleft().event()
                if isinstance(event, Span) or not event.system:
                    self._stats.add(event)
                    self._events.append(event)
                    self._count += 1

    def _look(self) -> None:
        """Called by the loop: stop if nobody has asked for a while."""
        due = self._asked + LEASE_SECONDS
        if due <= _now():
            self.close()
        else:
            self._call_at(due, self._look)

    def close(self) -> None:
        with self._lock:
            unsubscribe, self._unsubscribe = self._unsubscribe, None
            self._records.clear()
        if unsubscribe is not None:
            unsubscribe()
