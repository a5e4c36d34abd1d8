"""The requests of one caller that have no answer yet, and which of them the caller has cancelled.

Rules that hold here:

- A request is open from its arrival to its answer. A cancel that finds it closed has crossed the answer: nothing
  follows.
- A request that was cancelled before its function begins does not begin. Later its result is dropped.
- What a function has returned and is not done, a coroutine for example, is stopped at most once: by the cancel or, if
  the cancel was first, by whoever notes it with ``wait``.
- There is no lock: every step is one operation on a dictionary or a set. Two threads that meet here each write first
  and look after that, so at least one of them sees the other.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Stop = TypeVar("Stop")


class ServedCalls(Generic[Stop]):
    """The requests on one connection, by id. Ids are the caller's own: it reaches no request but its own.

    The server adds to ``open`` and looks at ``cancelled`` itself, because every call passes there.
    """

    __slots__ = ("_stops", "cancelled", "open")

    def __init__(self) -> None:
        self.open: dict[int, None] = {}
        self.cancelled: set[int] = set()
        self._stops: dict[int, Stop] = {}  # how to stop what functions have returned and is not done

    def cancel(self, call_id: int) -> Stop | None:
        """The caller has cancelled a call.

        Returns:
            What stops it, if its function has returned something that is not done.
        """
        if call_id not in self.open:
            return None
        self.cancelled.add(call_id)
        if call_id not in self.open:  # answered meanwhile, by a thread that may have looked before that line
            self.cancelled.discard(call_id)
            return None
        return self._stops.pop(call_id, None)

    def wait(self, call_id: int, stop: Stop) -> bool:
        """The function has returned something that is not done, and that ``stop`` stops.

        Returns:
            Whether to stop it now: the call was cancelled before.
        """
        self._stops[call_id] = stop
        return call_id in self.cancelled and self._stops.pop(call_id, None) is not None

    def waited(self, call_id: int) -> None:
        """It is done: nothing is left to stop."""
        self._stops.pop(call_id, None)

    def answered(self, call_id: int) -> None:
        """The answer is sent, or lost."""
        self.open.pop(call_id, None)
        if self.cancelled:
            self.cancelled.discard(call_id)

    def validate(self) -> None:
        assert self.cancelled <= self.open.keys(), "a call is cancelled that is not open"
        assert self._stops.keys() <= self.open.keys(), "something can be stopped whose call is not open"
        assert self.cancelled.isdisjoint(self._stops), "a cancelled call was not stopped"
