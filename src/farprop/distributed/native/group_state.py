"""The state of a group on one rank: the current collective, and whether the group is broken."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from farprop.errors import CollectiveError, renewed
from farprop.locks import make_lock
from farprop.protocol.collective_consistency import CollectiveConsistency
from farprop.runtime.first_failure import explained

_MAX_FINGERPRINT = 1000  # characters: shared memory has room for as many
PATIENCE = 0.1  # seconds that a rank waits for others before it sends its fingerprint to all


@dataclass
class CollectiveCall:
    """A collective while it runs.

    Attributes:
        number: its number in the group.
        fingerprint: a text that has to be the same on every rank.
        seconds: the timeout.
        deadline: when the timeout is over, on the monotonic clock.
        is_announced: whether this rank has sent its fingerprint to all others.
    """

    number: int
    fingerprint: str
    seconds: float
    deadline: float
    is_announced: bool = False

    @cached_property
    def encoded(self) -> bytes:
        """The number and the fingerprint as bytes, with a zero byte at the end: no value is a prefix of another."""
        return f"{self.number} {self.fingerprint}".encode() + b"\0"


def _shortened(fingerprint: str) -> str:
    """A fingerprint that fits into shared memory. The digest keeps texts apart that differ only in the part cut off."""
    if len(fingerprint) <= _MAX_FINGERPRINT - 100:
        return fingerprint
    digest = hashlib.sha256(fingerprint.encode()).hexdigest()[:16]
    return f"{fingerprint[: _MAX_FINGERPRINT - 200]}... (digest {digest})"


class GroupState:
    """``protocol.collective_consistency`` with a lock and a clock.

    Args:
        rank: this rank.
        size: the number of ranks.
        on_failure: called once, without the lock, when the group breaks. Its second argument says whether the other
            ranks have to be told.
    """

    def __init__(self, rank: int, size: int, on_failure: Callable[[CollectiveError, bool], None]) -> None:
        self._consistency = CollectiveConsistency(rank, size)
        self._on_failure = on_failure
        self._lock = make_lock("group_state")

    @property
    def failure(self) -> CollectiveError | None:
        """What broke the group, or None."""
        return self._consistency.failure

    def begin(self, fingerprint: str, seconds: float) -> CollectiveCall:
        """This rank calls a collective.

        Raises:
            CollectiveError: the group is broken.
        """
        fingerprint = _shortened(fingerprint)
        try:
            with self:
                number = self._consistency.begin(fingerprint)
        except CollectiveError as error:
            raise renewed(error) from None
        return CollectiveCall(number, fingerprint, seconds, time.monotonic() + seconds)

    def on_fingerprint(self, rank: int, number: int, fingerprint: str) -> None:
        with self:
            self._consistency.on_fingerprint(rank, number, fingerprint)

    def on_peer_lost(self, rank: int, why: str) -> None:
        with self:
            self._consistency.on_peer_lost(rank, why)

    def on_peer_left(self, rank: int, kind: str, text: str) -> None:
        with self:
            self._consistency.on_peer_left(rank, kind, text)

    def on_peer_failure(self, rank: int, kind: str, text: str) -> None:
        with self:
            self._consistency.on_peer_failure(rank, kind, text)

    def fail_local(self, error: BaseException) -> None:
        with self:
            self._consistency.fail_local(error)

    def fail_group(self, why: str) -> None:
        with self:
            self._consistency.fail_group(why)

    def check_wait(self, awaited: Collection[int], call: CollectiveCall) -> None:
        """Check that a thread that waits for other ranks in a collective may go on waiting.

        Raises:
            CollectiveError: the group is broken, one of the ranks has left, or the collective's time is over.
        """
        with self:
            error = self._consistency.wait_error(awaited)
            if error is None and time.monotonic() >= call.deadline:
                self._consistency.on_timeout(awaited, call.seconds)
                error = self._consistency.failure
        if error is not None:
            raise renewed(error)

    def __enter__(self) -> None:
        """Take the lock, and note whether the group is broken."""
        self._lock.acquire()
        self._was_broken = self._consistency.failure is not None

    def __exit__(self, *_: object) -> None:
        """Release the lock, and report the failure if the group has broken meanwhile."""
        failure = self._consistency.failure
        if failure is not None and not self._was_broken:
            explained(failure)
        is_new, tell_others = failure is not None and not self._was_broken, not self._consistency.is_announced
        self._lock.release()
        if is_new and failure is not None:
            self._on_failure(failure, tell_others)
