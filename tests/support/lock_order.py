"""Locks that know the order in which they may be taken, and raise if it is broken.

The order is the table "Locks" in ``docs/design.md``: a thread may take a lock only if its row is below those of all the
locks that the thread holds. A wrong order need not deadlock to be found: it raises the first time that it is taken.
That holds for ``acquire(blocking=False)``, too: farprop tries before it waits.
"""

from __future__ import annotations

import os
import re
import threading
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

VARIABLE = "FARPROP_TESTS_LOCK_ORDER"  # if set to 1, workers check the order, too

_DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
_ROW = re.compile(r"^\| `(\w+)` \|", re.M)


class LockOrderError(AssertionError):
    """A thread takes locks in an order that the table does not allow."""


class _Held(threading.local):
    def __init__(self) -> None:
        self.locks: list[OrderedLock] = []


_held = _Held()


class OrderedLock:
    """As ``threading.Lock``."""

    def __init__(self, name: str, rank: int) -> None:
        self.name = name
        self.rank = rank
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._check(blocking)
        taken = self._lock.acquire(blocking, timeout)
        if taken:
            _held.locks.append(self)
        return taken

    def _check(self, blocking: bool) -> None:
        for other in _held.locks:
            if other is self:
                if not blocking:
                    continue
                raise LockOrderError(f"this thread holds {self.name} already, and would wait for itself")
            if other.rank >= self.rank:
                raise LockOrderError(
                    f"{self.name} is taken while {other.name} is held; the table in docs/design.md has them in the "
                    "other order"
                )

    def release(self) -> None:
        if self in _held.locks:
            _held.locks.remove(self)
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def _is_owned(self) -> bool:
        return self in _held.locks

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@cache
def ranks() -> dict[str, int]:
    """The names of the table, with their places in it."""
    text = _DESIGN.read_text()
    section = text[text.index("## Locks") :].split("\n## ", 1)[0]
    return {name: rank for rank, name in enumerate(_ROW.findall(section))}


def make(name: str) -> Any:
    """The replacement of ``farprop.locks.make_lock`` while this is installed."""
    return OrderedLock(name, ranks()[name])


def install() -> None:
    """From now on, all new locks of farprop check their order."""
    from farprop import locks

    locks.factory = make


def install_if_wanted() -> None:
    if os.environ.get(VARIABLE) == "1":
        install()
