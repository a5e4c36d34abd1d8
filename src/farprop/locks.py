"""Makes all of farprop's locks.

Each lock has a name. The table "Locks" in ``docs/design.md`` says what the lock of each name guards, and in which order
locks may be taken. The tests replace ``factory`` with one whose locks raise if that order is broken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Protocol

factory: Callable[[str], threading.Lock] | None = None


def make_lock(name: str) -> threading.Lock:
    """Make the lock with this name."""
    return threading.Lock() if factory is None else factory(name)


def lock_maker(name: str) -> Callable[[], threading.Lock]:
    """Return a function that makes locks with this name: outside of tests ``threading.Lock`` itself, for speed."""
    return threading.Lock if factory is None else partial(factory, name)


class OwnedLock(Protocol):
    """A lock that knows whether this thread holds it, from the moment it is taken."""

    def __enter__(self) -> bool: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def _is_owned(self) -> bool:
        """Whether this thread holds the lock. ``threading.Condition`` uses this name."""


def make_owned_lock(name: str) -> OwnedLock:
    """Make a lock that knows whether this thread holds it. It must not be taken twice."""
    return threading.RLock() if factory is None else factory(name)  # type: ignore[return-value]
