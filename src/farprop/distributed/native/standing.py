"""How the group stands, for the threads that ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from farprop.distributed.native.calls import Call, shortened
from farprop.errors import CollectiveError, renewed
from farprop.protocol.agreement import Agreement


class Standing:
    """The machine of ``protocol.agreement`` with a lock and a clock.

    ``on_failure`` is called once, outside of the lock, when something has broken the group; with True if the other ranks
    have to be told.
    """

    def __init__(self, rank: int, on_failure: Callable[[CollectiveError, bool], None]) -> None:
        self._agreement = Agreement(rank)
        self._on_failure = on_failure
        self._lock = threading.Lock()

    @property
    def failure(self) -> CollectiveError | None:
        return self._agreement.failure

    def begin(self, statement: str, seconds: float) -> Call:
        statement = shortened(statement)
        with self._noticing():
            number = self._agreement.begin(statement)
        return Call(number, statement, seconds, time.monotonic() + seconds)

    def hear(self, rank: int, number: int, statement: str) -> None:
        with self._noticing():
            self._agreement.hear(rank, number, statement)

    def die(self, rank: int, why: str) -> None:
        with self._noticing():
            self._agreement.die(rank, why)

    def leave(self, rank: int) -> None:
        with self._noticing():
            self._agreement.leave(rank)

    def be_told(self, rank: int, kind: str, text: str) -> None:
        with self._noticing():
            self._agreement.be_told(rank, kind, text)

    def stumble(self, error: BaseException) -> None:
        with self._noticing():
            self._agreement.stumble(error)

    def check(self, awaited: Collection[int], call: Call) -> None:
        """Raise if it is in vain to wait for these ranks, or time is up."""
        with self._noticing():
            error = self._agreement.blame(awaited)
            if error is None and time.monotonic() >= call.deadline:
                self._agreement.give_up(awaited, call.seconds)
                error = self._agreement.failure
        if error is not None:
            raise renewed(error)

    def _noticing(self) -> _Noticing:
        return _Noticing(self._agreement, self._lock, self._on_failure)


class _Noticing:
    """Holds the lock, and tells afterwards if the group has broken meanwhile."""

    def __init__(
        self, agreement: Agreement, lock: threading.Lock, on_failure: Callable[[CollectiveError, bool], None]
    ) -> None:
        self._agreement = agreement
        self._lock = lock
        self._on_failure = on_failure

    def __enter__(self) -> None:
        self._lock.acquire()
        self._was_broken = self._agreement.failure is not None

    def __exit__(self, *_: object) -> None:
        failure, to_tell = self._agreement.failure, not self._agreement.is_announced
        news = failure is not None and not self._was_broken
        self._agreement.is_announced = failure is not None
        self._lock.release()
        if news and failure is not None:
            self._on_failure(failure, to_tell)
