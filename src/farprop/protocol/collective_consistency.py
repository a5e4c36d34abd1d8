"""Whether the ranks of a group call the same collectives in the same order, and what ends a wait for one of them.

Each rank numbers its collectives, and sends the number with a *fingerprint* of the call, a text such as
``allreduce of float32 [4] with SUM``. One object here is one rank's view of the group. Rules that hold:

- Two ranks with different fingerprints for one number break the group, whichever fingerprint arrives first.
- A rank that dies, or that another rank can't reach, breaks the group. A rank that leaves does not: it may have done
  its part in collectives that others have not begun. But nobody can wait for it.
- A rank may run ahead of the others: a root sends and goes on. Its fingerprints are kept until the others get there,
  up to a limit.
- The first failure is the one that every later call raises. A rank that detects a failure tells the others; a rank
  that was told does not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from farprop.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, RankLostError

# A fingerprint may arrive long after the collective is over here: a root sends and goes on. So many of our own are
# kept to compare with.
_KEPT = 256
# The most bytes of fingerprints that one rank may send ahead of us: about a million, with what each takes beside its
# text.
_MAX_EARLY_BYTES = 256 << 20
_OVERHEAD = 200
_ADVICE = "Every rank of a group has to call the same collectives in the same order."


class CollectiveConsistency:
    """One rank's view of the collectives of its group.

    Attributes:
        rank: this rank.
        number: the number of the current collective; 0 before the first.
        failure: what broke the group, or None.
        is_announced: whether the other ranks know of the failure already.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._others = frozenset(range(size)) - {rank}
        self.number = 0
        self.failure: CollectiveError | None = None
        self.is_announced = False
        self._own: dict[int, str] = {}
        self._early: dict[int, dict[int, str]] = {}  # by number and rank
        self._early_bytes: Counter[int] = Counter()  # by rank
        self._arrived: set[int] = set()  # ranks whose fingerprint of the current number is here
        self._left: set[int] = set()
        self._kept: deque[int] = deque()

    def begin(self, fingerprint: str) -> int:
        """This rank calls a collective.

        Returns:
            The number of the collective.

        Raises:
            CollectiveError: the group is broken.
        """
        if self.failure is not None:
            raise self.failure
        self.number += 1
        self._own[self.number] = fingerprint
        self._kept.append(self.number)
        if len(self._kept) > _KEPT:
            del self._own[self._kept.popleft()]
        self._arrived.clear()
        for rank, theirs in self._early.pop(self.number, {}).items():
            self._early_bytes[rank] -= len(theirs) + _OVERHEAD
            self.on_fingerprint(rank, self.number, theirs)
        if self.failure is not None:
            raise self.failure
        return self.number

    def on_fingerprint(self, rank: int, number: int, fingerprint: str) -> None:
        """Another rank has sent the fingerprint of its collective ``number``."""
        if self.failure is not None:
            return  # no collective can begin any more
        if number > self.number:
            self._keep_early(rank, number, fingerprint)
            return
        if number == self.number:
            self._arrived.add(rank)
        if self._own.get(number, fingerprint) != fingerprint:
            self._fail(
                CollectiveMismatchError(
                    f"Rank {self.rank} called {self._own[number]}, and rank {rank} called {fingerprint}, as "
                    f"collective {number} of their group. {_ADVICE}"
                )
            )

    def _keep_early(self, rank: int, number: int, fingerprint: str) -> None:
        early = self._early.setdefault(number, {})
        if rank in early:
            if early[rank] != fingerprint:
                self._fail(
                    CollectiveMismatchError(
                        f"Rank {rank} called {early[rank]}, and also {fingerprint}, as collective {number} of the "
                        "group."
                    )
                )
            return
        early[rank] = fingerprint
        self._early_bytes[rank] += len(fingerprint) + _OVERHEAD
        if self._early_bytes[rank] > _MAX_EARLY_BYTES:
            self.fail_group(
                f"Rank {rank} is at collective {number} of the group, and rank {self.rank} still at {self.number}. "
                f"The fingerprints in between take more than {_MAX_EARLY_BYTES >> 20} MiB. Have ranks that run ahead "
                "wait for the others now and then, such as in a barrier."
            )

    def on_peer_lost(self, rank: int, why: str) -> None:
        """The connection to a rank is gone. That breaks the group, unless the rank had said goodbye."""
        if rank not in self._left:
            self._fail(
                RankLostError(
                    f"Rank {self.rank} has lost rank {rank}: {why}. It died, or the network is cut. The group can't be "
                    "used any more."
                )
            )

    def on_peer_left(self, rank: int, kind: str, text: str) -> None:
        """A rank has said goodbye.

        Args:
            kind, text: the class and text of the failure that it knows of, if the group is broken. Who reported the
                failure may be heard later than this, and the goodbye must not be taken for the reason.
        """
        if text:
            self._fail(_error(kind, text))
            self.is_announced = True
        self._left.add(rank)

    def on_peer_failure(self, rank: int, kind: str, text: str) -> None:
        """Another rank says that the group is broken; ``kind`` is the name of its error's class."""
        self._fail(_error(kind, text if kind == CollectiveMismatchError.__name__ else f"Rank {rank} gave up: {text}"))
        self.is_announced = True

    def on_timeout(self, awaited: Collection[int], seconds: float) -> None:
        """The collective's time is over while this rank waits for ``awaited``.

        If they have called the collective, they wait in it for the ranks that have not, so those are named.
        """
        missing = awaited if self._arrived.isdisjoint(awaited) else (self._others - self._arrived or awaited)
        who = f"rank {min(missing)}" if len(missing) == 1 else f"ranks {', '.join(map(str, sorted(missing)))}"
        self._fail(
            CollectiveTimeoutError(
                f"Rank {self.rank} timed out in {self._own.get(self.number)}, collective {self.number} of the group, "
                f"after a timeout of {seconds:g} s: it waited for {who}. {_ADVICE}"
            )
        )

    def fail_local(self, error: BaseException) -> None:
        """The current collective failed on this rank, so the others would wait for its part in vain."""
        kind = RankLostError if isinstance(error, RankLostError) else CollectiveError
        self._fail(
            kind(
                f"{self._own.get(self.number)}, collective {self.number} of the group, failed on rank {self.rank}: "
                f"{type(error).__name__}: {error}"
            )
        )

    def fail_group(self, why: str) -> None:
        """Something went wrong outside of any collective, and this rank can't go on."""
        self._fail(CollectiveError(f"{why} The group can't be used any more."))
        self._early.clear()

    def wait_error(self, awaited: Collection[int]) -> CollectiveError | None:
        """Why a wait for these ranks can't end well; None if it can."""
        if self.failure is None and not self._left.isdisjoint(awaited):
            who = min(self._left.intersection(awaited))
            return RankLostError(
                f"Rank {who} has left the group (destroy_process_group, or its program has ended), and rank "
                f"{self.rank} still calls collectives. {_ADVICE}"
            )
        return self.failure

    def _fail(self, error: CollectiveError) -> None:
        if self.failure is None:
            self.failure = error

    def validate(self) -> None:
        """Assert what must hold between any two events."""
        assert all(number > self.number for number in self._early)
        assert len(self._own) == len(self._kept) <= _KEPT
        assert not self.is_announced or self.failure is not None


def _error(kind: str, text: str) -> CollectiveError:
    """A failure that another rank tells of."""
    if kind == CollectiveMismatchError.__name__:
        return CollectiveMismatchError(text)
    return RankLostError(text) if kind == RankLostError.__name__ else CollectiveError(text)
