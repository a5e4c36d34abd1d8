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

    ``on_failure`` is called once, outside of the lock, when something has broken the group; with True if the others
    have to be told.
    """

    def __init__(self, rank: int, size: int, on_failure: Callable[[CollectiveError, bool], None]) -> None:
        self._agreement = Agreement(rank, size)
        self._on_failure = on_failure
        self._lock = threading.Lock()

    @property
    def failure(self) -> CollectiveError | None:
        return self._agreement.failure

    def begin(self, statement: str, seconds: float) -> Call:
        statement = shortened(statement)
        try:
            with self:
                number = self._agreement.begin(statement)
        except CollectiveError as error:
            raise renewed(error) from None
        return Call(number, statement, seconds, time.monotonic() + seconds)

    def hear(self, rank: int, number: int, statement: str) -> None:
        with self:
            self._agreement.hear(rank, number, statement)

    def die(self, rank: int, why: str) -> None:
        with self:
            self._agreement.die(rank, why)

    def leave(self, rank: int) -> None:
        with self:
            self._agreement.leave(rank)

    def be_told(self, rank: int, kind: str, text: str) -> None:
        with self:
            self._agreement.be_told(rank, kind, text)

    def stumble(self, error: BaseException) -> None:
        with self:
            self._agreement.stumble(error)

    def break_down(self, why: str) -> None:
        with self:
            self._agreement.break_down(why)

    def check(self, awaited: Collection[int], call: Call) -> None:
        """Raise if it is in vain to wait for these ranks, or time is up."""
        with self:
            error = self._agreement.blame(awaited)
            if error is None and time.monotonic() >= call.deadline:
                self._agreement.give_up(awaited, call.seconds)
                error = self._agreement.failure
        if error is not None:
            raise renewed(error)

    def __enter__(self) -> None:
        """Holds the lock, and notices if the group breaks meanwhile."""
        self._lock.acquire()
        self._was_broken = self._agreement.failure is not None

    def __exit__(self, *_: object) -> None:
        failure = self._agreement.failure
        is_news, to_tell = failure is not None and not self._was_broken, not self._agreement.is_announced
        self._lock.release()
        if is_news and failure is not None:
            self._on_failure(failure, to_tell)
