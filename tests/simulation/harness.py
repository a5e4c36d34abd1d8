"""What all kinds of simulated jobs share: virtual time, violations, outcomes, and mutants."""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock


class Violation(Exception):
    """The protocol broke a promise."""


class Outcome(NamedTuple):
    """The result of one run."""

    seed: int
    failure: str | None
    counts: Counter[str]
    kind: str = "references"


class Clock:
    """Virtual time. Events happen one after the other; those of the same moment in the order they were scheduled in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def after(self, delay: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), action, arguments))

    def step(self) -> bool:
        """Let the next event happen; False if there is none."""
        if not self._events:
            return False
        self.now, _, action, arguments = heapq.heappop(self._events)
        action(*arguments)
        return True


class Mutant(NamedTuple):
    """A wrong method that replaces the right one. Its docstring says what is wrong with it."""

    owner: type
    method: str
    replacement: Callable[..., Any]
    kind: str
    """The kind of simulated job that has to kill it."""


MUTANTS: dict[str, Mutant] = {}


def mutant(owner: type, method: str, kind: str = "references") -> Callable[[Any], Any]:
    """Register a function, or a property, as a mutant."""

    def register(replacement: Any) -> Any:
        function = replacement.fget if isinstance(replacement, property) else replacement
        MUTANTS[function.__name__.replace("_", "-")] = Mutant(owner, method, replacement, kind)
        return replacement

    return register


@contextlib.contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Replace the right method by a mutant, or by none, while the block runs."""
    if name is None:
        yield
        return
    found = MUTANTS[name]
    with mock.patch.object(found.owner, found.method, found.replacement):
        yield
