"""The table of calls under way. A call is opened once and leaves the table exactly once.

Rules that hold here:

- ``answer``, ``expire`` and ``lost`` each remove what they return; an id that is gone gives nothing. So every call
  ends exactly once, whatever the order of answers, deadlines and broken connections.
- A call without a deadline is never expired.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Call = TypeVar("Call")


class CallTable(Generic[Call]):
    """The calls to one peer by id, with their deadline (0 for none)."""

    def __init__(self) -> None:
        self._calls: dict[int, tuple[Call, float]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def open(self, call_id: int, call: Call, deadline: float) -> bool:
        """Add a call; True if its deadline is now the nearest, so that whoever keeps time must be told."""
        self._calls[call_id] = call, deadline
        if not deadline:
            return False
        entry = (deadline, call_id)
        heapq.heappush(self._deadlines, entry)
        return self._deadlines[0] is entry

    def answer(self, call_id: int) -> Call | None:
        """Take out the call that this answer is for; None if it ended already."""
        entry = self._calls.pop(call_id, None)
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * len(self._calls):
            self._drop_dead_deadlines()
        return None if entry is None else entry[0]

    def next_deadline(self) -> float:
        """When to call ``expire`` next; 0 for never."""
        while self._deadlines:
            deadline, call_id = self._deadlines[0]
            if call_id in self._calls:
                return deadline
            heapq.heappop(self._deadlines)
        return 0.0

    def expire(self, now: float) -> list[Call]:
        """Take out all calls whose deadline has passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, call_id = heapq.heappop(self._deadlines)
            entry = self._calls.pop(call_id, None)
            if entry is not None:
                expired.append(entry[0])
        return expired

    def lost(self) -> list[Call]:
        """The peer is gone: take out all calls."""
        calls = [entry[0] for entry in self._calls.values()]
        self._calls.clear()
        self._deadlines.clear()
        return calls

    def _drop_dead_deadlines(self) -> None:
        # Answered calls leave their deadline behind; without this the heap would grow with every call.
        self._deadlines = [entry for entry in self._deadlines if entry[1] in self._calls]
        heapq.heapify(self._deadlines)

    def validate(self) -> None:
        live = {call_id for _, call_id in self._deadlines}
        for call_id, (_, deadline) in self._calls.items():
            assert not deadline or call_id in live, f"call {call_id} has a deadline that nobody keeps"
        assert len(self._deadlines) <= max(64, 4 * len(self._calls)) + 1
