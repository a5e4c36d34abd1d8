"""Streams: the items of a generator on one worker, the callee, as another one, the caller, takes them.

``Consumer`` decides for the caller, ``Producer`` for the callee. The caller asks with *pulls*, numbered from 0. Each
brings the number of items that the generator may have produced in all, and is answered once. Rules that hold here:

- The generator is never more than ``window`` items ahead of the caller. Items on their way count as not taken.
- Pulls are answered in the order of their numbers, although they may arrive in any. So the answers, in that order, are
  the items in theirs, and then the end or the error.
- A pull is answered as soon as there is an item, with all that are ready and may travel together: while many are
  produced in a round trip, answers are few.
- Several pulls are open at once, so that the next item has not to wait for a round trip.
- The generator is closed once: after a close, and never while it runs.
- A close may overtake the call that opens the stream, or come instead of it: such numbers are remembered.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from farprop.errors import ProtocolError

MAX_WINDOW = 1 << 16
OPEN_PULLS = 2  # at once: one is answered while the next is on its way
_MOST_PARKED = 16  # of one stream: a caller that keeps to the rules has fewer
_MOST_TOGETHER = 64  # items in one answer
_REMEMBERED = 10_000  # closes that came early


class Pull(NamedTuple):
    """Send a pull: its number, and how many items the generator may have produced in all."""

    number: int
    allowed: int


class Consumer:
    """The caller's end.

    Args:
        window: how many items the generator may be ahead. The call that opens the stream allows as many.
    """

    def __init__(self, window: int) -> None:
        self.is_over = False  # the end or the error has arrived, or nobody wants more
        self.received = 0
        self._window = window
        self._taken = 0
        self._sent = 0  # pulls
        self._answered = 0

    def pulls(self) -> list[Pull]:
        """The pulls to send now. They have to be sent.

        A pull that nothing can follow is not sent, so the newest of the open ones always allows another item. While
        more than half of the window waits to be taken there are none either: many items then come with each answer.
        """
        unused = self.received - self._taken
        found: list[Pull] = []
        if not self.is_over and unused < self._window and unused <= self._window // 2:
            while self._sent - self._answered < OPEN_PULLS:
                found.append(Pull(self._sent, self._taken + self._window))
                self._sent += 1
        return found

    def on_answer(self, items: int, is_end: bool) -> None:
        """The oldest open pull is answered with so many items, or with the end."""
        if not items and not is_end:
            raise ProtocolError("an answer of a stream has no item, and is not its end")
        self._answered += 1
        self.received += items
        self.is_over = self.is_over or is_end

    def on_taken(self) -> None:
        """The program has taken an item."""
        self._taken += 1

    def on_closed(self) -> None:
        """Nobody wants more items. Unless it was over before, the callee has to be told."""
        self.is_over = True


class Run(NamedTuple):
    """Have the generator produce: call ``on_item``, ``on_end`` or ``on_error``, for as long as ``is_running``."""


class Answer(NamedTuple):
    """Answer a pull with these items, or that no more follow."""

    pull: Any
    items: tuple[Any, ...]
    is_end: bool


class Fail(NamedTuple):
    """Answer a pull with the generator's error. All items have been sent."""

    pull: Any
    error: BaseException


class Close(NamedTuple):
    """Close the generator."""


Action = Run | Answer | Fail | Close


class Producer:
    """The callee's end. Each event is a method, which returns the actions to perform.

    Args:
        window: how many items may be produced before the first pull arrives.
    """

    def __init__(self, window: int) -> None:
        self.is_running = False
        self.has_ended = False  # the generator, or it is being closed
        self.is_closed = False
        self._allowed = min(window, MAX_WINDOW)
        self._produced = 0
        self._sent = 0  # items
        self._ready: deque[tuple[Any, bool]] = deque()  # items, and whether each may travel with others
        self._parked: dict[int, Any] = {}  # pulls by number
        self._next_pull = 0
        self._has_told = False  # the caller, of the end or the error
        self._error: BaseException | None = None

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do: the generator has ended and the caller was told, or it is closed."""
        return self._has_told or (self.is_closed and self.has_ended)

    def on_opened(self) -> list[Action]:
        return self._follow()

    def on_pull(self, number: int, allowed: int, pull: Any) -> list[Action]:
        """A pull has arrived; ``pull`` is what to answer."""
        if self.is_closed or self._has_told:
            return [Answer(pull, (), True)]
        if not self._next_pull <= number < self._next_pull + _MOST_PARKED or number in self._parked:
            raise ProtocolError(f"pull {number} of a stream, after {self._next_pull} answers")
        self._parked[number] = pull
        self._allowed = max(self._allowed, min(allowed, self._sent + MAX_WINDOW))
        return self._follow()

    def on_item(self, item: Any, with_others: bool) -> list[Action]:
        """The generator has yielded an item. ``with_others``: it may travel with others, because it is small."""
        self._produced += 1
        if not self.is_closed:
            self._ready.append((item, with_others))
        self.is_running = not self.is_closed and self._produced < self._allowed
        return self._end_closed() if self.is_closed else self._follow()

    def on_end(self) -> list[Action]:
        """The generator has ended."""
        self.is_running, self.has_ended = False, True
        return self._follow()

    def on_error(self, error: BaseException) -> list[Action]:
        """The generator has raised, or an item of it can't be sent."""
        if not self.is_closed:
            self._error = error
        return self.on_end()

    def on_close(self) -> list[Action]:
        """The caller wants no more items, or is gone."""
        if self.is_closed:
            return []
        self.is_closed = True
        self._ready.clear()
        self._error = None
        found = self._answer_parked()
        return found if self.is_running else found + self._end_closed()

    def _end_closed(self) -> list[Action]:
        had_ended, self.has_ended = self.has_ended, True
        return [] if had_ended else [Close()]

    def _follow(self) -> list[Action]:
        found: list[Action] = []
        while self._next_pull in self._parked and (self._ready or self.has_ended):
            pull = self._parked.pop(self._next_pull)
            self._next_pull += 1
            if self._ready:
                found.append(Answer(pull, self._take_ready(), False))
                continue
            self._has_told = True
            found.append(Answer(pull, (), True) if self._error is None else Fail(pull, self._error))
            self._error = None
        if self._has_told:
            found += self._answer_parked()
        elif not (self.is_running or self.has_ended or self.is_closed) and self._produced < self._allowed:
            self.is_running = True
            found.append(Run())
        return found

    def _answer_parked(self) -> list[Action]:
        """Answer the pulls that nobody waits for any more."""
        found: list[Action] = [Answer(pull, (), True) for pull in self._parked.values()]
        self._parked.clear()
        return found

    def _take_ready(self) -> tuple[Any, ...]:
        item, with_others = self._ready.popleft()
        items = [item]
        while with_others and self._ready and self._ready[0][1] and len(items) < _MOST_TOGETHER:
            items.append(self._ready.popleft()[0])
        self._sent += len(items)
        return tuple(items)


class StreamNumbers:
    """Which streams one caller may open: each number once, and none that was closed before it was opened."""

    def __init__(self) -> None:
        self._closed: dict[int, None] = {}  # oldest first

    def may_open(self, number: int) -> bool:
        """The call that opens a stream has arrived."""
        if number not in self._closed:
            return True
        del self._closed[number]
        return False

    def on_unknown_close(self, number: int) -> None:
        """A stream is closed that is not open."""
        self._closed[number] = None
        if len(self._closed) > _REMEMBERED:
            del self._closed[next(iter(self._closed))]
