"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any


class Clock:
    """Events happen one after the other; those of the same moment in the order in which they were asked for."""

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
