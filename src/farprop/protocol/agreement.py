"""Whether the ranks of a group call the same collectives in the same order, and what ends a wait for one of them.

Each rank counts its collectives, and *states* what it calls with the number: ``allreduce of float32 [4] with SUM``. One
object here is one rank's view of the group. Rules that hold:

- Two ranks that state different things for one number break the group, whichever statement is heard first.
- A rank that dies, or that one of the others can't reach, breaks it. One that leaves does not: it may have done its
  part in what others have not even begun. But nobody can wait for it.
- A rank may run ahead of the others: a root sends, and goes on. What it states is kept until they come there, but not
  without end.
- The first thing that breaks a group is what every later call raises. A rank that found it out by itself tells the
  others; one that was told does not.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection

from farprop.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, RankLostError

# A statement may come when its collective is long over here: a root sends, and goes on. So many are kept to compare.
_KEPT = 256
# And so many bytes of what one rank states ahead of us: a million statements or so, each with what it takes beside its
# text.
_MOST_EARLY = 256 << 20
_OVERHEAD = 200
_ADVICE = "Every rank of a group has to call the same collectives in the same order."


class Agreement:
    """``failure`` is what broke the group, or None. ``is_announced`` says whether the others know it already."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self._others = frozenset(range(size)) - {rank}
        self.number = 0
        self.failure: CollectiveError | None = None
        self.is_announced = False
        self._own: dict[int, str] = {}
        self._early: dict[int, dict[int, str]] = {}  # by number and rank
        self._early_bytes: Counter[int] = Counter()  # by rank
        self._heard: set[int] = set()  # who has stated the current number
        self._left: set[int] = set()
        self._order: deque[int] = deque()

    def begin(self, statement: str) -> int:
        """This rank calls something: its number. Raises if the group is broken."""
        if self.failure is not None:
            raise self.failure
        self.number += 1
        self._own[self.number] = statement
        self._order.append(self.number)
        if len(self._order) > _KEPT:
            del self._own[self._order.popleft()]
        self._heard.clear()
        for rank, theirs in self._early.pop(self.number, {}).items():
            self._early_bytes[rank] -= len(theirs) + _OVERHEAD
            self.hear(rank, self.number, theirs)
        if self.failure is not None:
            raise self.failure
        return self.number

    def hear(self, rank: int, number: int, statement: str) -> None:
        """Another rank has stated something."""
        if self.failure is not None:
            return  # nobody will call anything any more
        if number > self.number:
            self._hear_early(rank, number, statement)
            return
        if number == self.number:
            self._heard.add(rank)
        if self._own.get(number, statement) != statement:
            self._fail(
                CollectiveMismatchError(
                    f"Rank {self.rank} called {self._own[number]}, and rank {rank} called {statement}, as collective "
                    f"{number} of their group. {_ADVICE}"
                )
            )

    def _hear_early(self, rank: int, number: int, statement: str) -> None:
        early = self._early.setdefault(number, {})
        if rank in early:
            if early[rank] != statement:
                self._fail(
                    CollectiveMismatchError(
                        f"Rank {rank} called {early[rank]}, and also {statement}, as collective {number} of the group."
                    )
                )
            return
        early[rank] = statement
        self._early_bytes[rank] += len(statement) + _OVERHEAD
        if self._early_bytes[rank] > _MOST_EARLY:
            self.break_down(
                f"Rank {rank} is at collective {number} of the group, and rank {self.rank} still at {self.number}. "
                f"What it has stated meanwhile takes more than {_MOST_EARLY >> 20} MiB. Have ranks that run ahead wait "
                "for the others now and then, such as in a barrier."
            )

    def die(self, rank: int, why: str) -> None:
        """A rank is gone, without a word."""
        if rank not in self._left:
            self._fail(
                RankLostError(
                    f"Rank {self.rank} has lost rank {rank}: {why}. It died, or the network is cut. The group can't be "
                    "used any more."
                )
            )

    def leave(self, rank: int) -> None:
        """A rank has said goodbye."""
        self._left.add(rank)

    def be_told(self, rank: int, kind: str, text: str) -> None:
        """Another rank says that the group is broken."""
        if kind == CollectiveMismatchError.__name__:
            self._fail(CollectiveMismatchError(text))
        else:
            error = RankLostError if kind == RankLostError.__name__ else CollectiveError
            self._fail(error(f"Rank {rank} gave up: {text}"))
        self.is_announced = True

    def give_up(self, awaited: Collection[int], seconds: float) -> None:
        """Time is up, and these were waited for. If they have come, they wait for somebody else."""
        missing = awaited if self._heard.isdisjoint(awaited) else (self._others - self._heard or awaited)
        who = f"rank {min(missing)}" if len(missing) == 1 else f"ranks {', '.join(map(str, sorted(missing)))}"
        self._fail(
            CollectiveTimeoutError(
                f"Rank {self.rank} timed out in {self._own.get(self.number)}, collective {self.number} of the group, "
                f"after a timeout of {seconds:g} s: it waited for {who}. {_ADVICE}"
            )
        )

    def stumble(self, error: BaseException) -> None:
        """Something else went wrong in the middle of a collective, so the others wait for what will not come."""
        kind = RankLostError if isinstance(error, RankLostError) else CollectiveError
        self._fail(
            kind(
                f"{self._own.get(self.number)}, collective {self.number} of the group, failed on rank {self.rank}: "
                f"{type(error).__name__}: {error}"
            )
        )

    def break_down(self, why: str) -> None:
        """Something went wrong outside of any collective, and this rank can't go on with the others."""
        self._fail(CollectiveError(f"{why} The group can't be used any more."))
        self._early.clear()

    def blame(self, awaited: Collection[int]) -> CollectiveError | None:
        """Why it is in vain to wait for these ranks; None if it is not."""
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
        assert all(number > self.number for number in self._early)
        assert len(self._own) == len(self._order) <= _KEPT
        assert not self.is_announced or self.failure is not None
