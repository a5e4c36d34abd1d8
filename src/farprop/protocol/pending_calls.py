"""The table of pending calls. A call is opened once and leaves the table exactly once.

Rules that hold here:

- ``answer``, ``expire`` and ``lost`` each remove the calls that they return; for an unknown id ``answer`` returns None.
  So every call ends exactly once, in any order of answers, deadlines and broken connections.
- A call without a deadline never expires.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

Call = TypeVar("Call")


class PendingCalls(Generic[Call]):
    """The calls to one peer, by id, with their deadlines. A call may have none. ``bytes`` is the sum of their sizes."""

    def __init__(self) -> None:
        self.bytes = 0
        self._calls: dict[int, tuple[Call, float | None, int]] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._calls

    def open(self, call_id: int, call: Call, deadline: float | None, size: int = 0) -> None:
        """Add a call, with the size of its request in bytes."""
        self.bytes = self.bytes + size if self._calls else size
        self._calls[call_id] = call, deadline, size
        if deadline is not None:
            heapq.heappush(self._deadlines, (deadline, call_id))

    def answer(self, call_id: int) -> Call | None:
        """Remove and return the call that an answer belongs to; None if it has ended already."""
        entry = self._calls.get(call_id)
        if len(self._deadlines) > 64 and len(self._deadlines) > 4 * len(self._calls):
            self._drop_dead_deadlines()
        if entry is None:
            return None
        self.bytes -= entry[2]  # an interrupt behind this may count it twice, until no call is pending
        del self._calls[call_id]  # last, and not by a call: an interrupt finds the call here or at the caller
        return entry[0]

    def next_deadline(self) -> float | None:
        """When to call ``expire`` next; None if no call has a deadline."""
        while self._deadlines:
            deadline, call_id = self._deadlines[0]
            if call_id in self._calls:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def expire(self, now: float) -> list[Call]:
        """Remove and return all calls whose deadlines have passed."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, call_id = heapq.heappop(self._deadlines)
            entry = self._calls.pop(call_id, None)
            if entry is not None:
                self.bytes -= entry[2]
                expired.append(entry[0])
        return expired

    def lost(self) -> list[Call]:
        """The peer is gone: remove and return all calls."""
        calls = [entry[0] for entry in self._calls.values()]
        self._calls, self._deadlines, self.bytes = {}, [], 0  # as in ``answer``
        return calls

    def _drop_dead_deadlines(self) -> None:
        # Answered calls leave their deadlines in the heap; without this it would grow with every call.
        deadlines = [entry for entry in self._deadlines if entry[1] in self._calls]
        heapq.heapify(deadlines)
        self._deadlines = deadlines

    def all(self) -> list[tuple[int, Call, float | None]]:
        """The calls with their ids and deadlines, oldest first."""
        return [(call_id, call, deadline) for call_id, (call, deadline, _) in self._calls.items()]

    def validate(self) -> None:
        live = {call_id for _, call_id in self._deadlines}
        assert self.bytes == sum(size for _, _, size in self._calls.values())
        for call_id, (_, deadline, _) in self._calls.items():
            assert deadline is None or call_id in live, f"the deadline of call {call_id} is not in the heap"
        assert len(self._deadlines) <= max(64, 4 * (len(self._calls) + 1)) + 1
