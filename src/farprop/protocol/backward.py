"""One backward pass on one worker.

A *source* is a send node of the local graph, for which gradients arrive, or the roots. A *target* is the send node of
another worker that a local recv node got its tensors from. Rules that hold here:

- A unit of the local graph runs once, when the gradients of all of its sources have arrived. Sources that are known to
  be unused don't count.
- One ``Run`` is performed at a time, so that the gradients that a unit waits for are computed when it runs. If no unit
  has more than one source, several sources may use ``start_unshared`` concurrently.
- The gradients for each target are sent once. A pass ends when its origin has all of the credit again and no worker is
  blocked.
- After a failure nothing is run or sent any more.

The origin detects the end of a pass by *credit recovery* (Mattern, 1989). It starts with all of the credit. Each
message carries a share of it, and a worker that has nothing left to do returns its share to the origin. When the origin
has all of the credit again, no message is in flight and no worker is active.

A worker keeps credit while it knows of another message of the pass that it will handle to the end: one that it handles
at the moment, or one that is *announced*. Whoever sends several messages to the same worker one after the other, each
as soon as its gradients are there, announces with the first how many follow (``Series``). The credit of all of them
then returns in one message. Messages may be handled in any order.

Each event is a method, which returns the actions to perform. The machine is not thread-safe: the caller locks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from farprop.errors import ProtocolError

ROOTS = 0  # the source for the gradients of the roots; other sources are autograd message ids, which are never 0


class PassId(NamedTuple):
    origin: int
    number: int


class Target(NamedTuple):
    """The send node that a recv node got its tensors from. The gradients of these tensors go to it."""

    worker: int
    message_id: int


class Unit(NamedTuple):
    """The nodes that the same set of sources reaches, and the targets of the recv nodes among them."""

    sources: frozenset[int]
    targets: tuple[Target, ...]


class Credit(NamedTuple):
    """An exact share of the credit: a number of parts, each of which is 2 to the power of minus ``level``."""

    parts: int
    level: int

    def plus(self, other: Credit) -> Credit:
        if self.level < other.level:
            return Credit((self.parts << (other.level - self.level)) + other.parts, other.level)
        return Credit(self.parts + (other.parts << (self.level - other.level)), self.level)

    def split(self, count: int) -> list[Credit]:
        """Split the credit into ``count`` shares, none of them empty."""
        if count == 1:
            return [self]
        bits = (count - 1).bit_length()
        level = self.level + bits
        rest = (self.parts << bits) - (count - 1) * self.parts
        return [*[Credit(self.parts, level)] * (count - 1), Credit(rest, level)]

    @property
    def is_whole(self) -> bool:
        return self.parts == 1 << self.level


NONE = Credit(0, 0)
WHOLE = Credit(1, 0)

# By rank, whether a worker is blocked, with the number of its report. Later reports have higher numbers.
Statuses = dict[int, tuple[int, bool]]


class CreditShare(NamedTuple):
    """Credit, and the reports of workers that became blocked or unblocked, which travel with it."""

    credit: Credit
    statuses: Statuses

    def plus(self, other: CreditShare) -> CreditShare:
        """Merge two shares, with the latest report of each worker."""
        statuses = dict(self.statuses)
        for worker, status in other.statuses.items():
            if status > statuses.get(worker, (0, False)):
                statuses[worker] = status
        return CreditShare(self.credit.plus(other.credit), statuses)


ALL = CreditShare(WHOLE, {})  # the origin's share at the start


class Series(NamedTuple):
    """A message's place among those that its sender sends to the same worker in this pass.

    ``following`` messages are announced by this one. ``announced``: an earlier one has announced this one.
    """

    following: int
    announced: bool


ALONE = Series(0, False)
_MOST_ANNOUNCED = 0xFFFF


class Announcer:
    """The series of messages that follow from gradients for several sources, which run one by one.

    A message goes to each worker that has targets of a source, even if there is no gradient in it. So it is known
    beforehand how many messages each worker gets.

    Args:
        targets: by source. None for a source of which it is not known what it leads to.
    """

    def __init__(self, targets: Iterable[Sequence[Target] | None]) -> None:
        self._counts = Counter([worker for some in targets for worker in {target.worker for target in some or ()}])
        self._begun: set[int] = set()
        self._due: set[int] = set()

    def begin(self, targets: Iterable[Target]) -> None:
        """The messages that follow from the source with these targets are sent now."""
        self._due = {target.worker for target in targets}

    def next(self, worker: int) -> Series:
        """The place of a message to this worker. Only the first one that follows from a source belongs to a series."""
        if worker not in self._due or not 1 < self._counts[worker] <= _MOST_ANNOUNCED:
            return ALONE
        self._due.remove(worker)
        if worker in self._begun:
            return Series(0, True)
        self._begun.add(worker)
        return Series(self._counts[worker] - 1, False)


class Run(NamedTuple):
    """Feed the gradients of ``source``, if any, to the graph, run these units, then call ``on_ran``."""

    source: int | None
    units: tuple[int, ...]
    share: CreditShare


class Send(NamedTuple):
    """Send the gradients for this target."""

    target: Target
    share: CreditShare


class GiveBack(NamedTuple):
    """Return a share to the origin."""

    share: CreditShare


class Release(NamedTuple):
    """Tell a blocked worker which of its sources are used."""

    worker: int
    used: frozenset[int]
    share: CreditShare


class Survey(NamedTuple):
    """Find out which sends the roots reach, then call ``on_surveyed``."""


class Stuck(NamedTuple):
    """A FAST pass can't end: these workers wait for gradients that never come."""

    workers: tuple[int, ...]


class Ended(NamedTuple):
    """The pass is complete on every worker."""


PassAction = Run | Send | GiveBack | Release | Survey | Stuck | Ended


def passed_on(share: CreditShare, targets: Sequence[Target]) -> list[PassAction]:
    """Actions that send the gradients to all targets, with a share of the credit each.

    The statuses travel with one of the shares. They are back at the origin when all of the credit is.
    """
    credits = share.credit.split(len(targets))
    sends: list[PassAction] = [
        Send(target, CreditShare(credit, {})) for target, credit in zip(targets, credits, strict=True)
    ]
    sends[0] = Send(targets[0], CreditShare(credits[0], share.statuses))
    return sends


class UnknownSource(Exception):
    """Gradients arrived for an unknown source, or arrived twice."""


class BackwardStateMachine:
    """See the module's rules.

    Args:
        own_rank: the rank of this worker.
        origin: the rank of the worker that called ``backward``.
        fast: whether the pass uses the FAST algorithm, which expects gradients for every source.
        units: the units of this worker's graph, as it is when the pass reaches the worker.
        sources: the sources of that graph.
    """

    def __init__(self, own_rank: int, origin: int, fast: bool, units: Sequence[Unit], sources: frozenset[int]) -> None:
        self.own_rank = own_rank
        self.origin = origin
        self.fast = fast
        self.units = units
        self.sources = sources
        self.failed = False
        self.ended = False
        self._arrived: set[int] = set()
        self._unused: set[int] = set()
        self._started: set[int] = set()
        self._missing: list[int] = []  # by unit, the number of its sources without gradients
        self._waiting: dict[int, list[int]] = {}  # by source, the units that it belongs to
        self._shared: list[int] = []  # units with more than one source
        for number, unit in enumerate(units):
            self._missing.append(len(unit.sources))
            if len(unit.sources) > 1:
                self._shared.append(number)
            for source in unit.sources:
                self._waiting.setdefault(source, []).append(number)
        self._nothing_shared = not fast and not self._shared
        self._running = False
        self._queue: deque[tuple[int | None, frozenset[int], CreditShare]] = deque()
        self._reported = (0, False)
        self._awaited = 0  # messages that will be handled to the end; below 0 if an announced one came too early
        self._kept: CreditShare | None = None  # to be returned when no message is awaited
        self._recovered = NONE
        self._statuses: Statuses = {}
        self._used: Mapping[int, frozenset[int]] | None = None  # the sends that the roots reach
        self._released: set[int] = set()  # ranks of the workers that a Release was sent to

    # At any worker

    def on_gradient(self, source: int, share: CreditShare) -> list[PassAction]:
        """The gradients of a source arrived. At the origin, ``ROOTS`` is the first source, with ``ALL``."""
        if self.failed:
            return []
        if source not in self.sources or source in self._arrived:
            raise UnknownSource
        self._arrived.add(source)
        self._queue.append((source, frozenset((source,)), share))
        return self._next()

    def start_unshared(self, source: int) -> Sequence[Target] | None:
        """The gradients of a source arrived; the short cut for graphs in which every unit has one source.

        Returns:
            The targets. The caller runs the unit of the source, then passes its share on with ``passed_on``, or with
            ``done_with`` if there are no targets. None if the short cut does not apply: call ``on_gradient`` instead.
        """
        if not self._nothing_shared or self.failed or source not in self.sources or source in self._arrived:
            return None
        self._arrived.add(source)
        (number,) = self._waiting[source]
        self._missing[number] = 0
        self._started.add(number)
        return self.units[number].targets

    def start_together(self, sources: Sequence[int], to: int | None) -> list[Sequence[Target]] | None:
        """The gradients of several sources arrived at once; the short cut if they lead to no other worker than ``to``.

        Returns:
            The targets of each. The caller runs the units of all sources, then goes on as after ``start_unshared``.
            None if the short cut does not apply.
        """
        new = set(sources)
        if not self._nothing_shared or self.failed or not new <= self.sources or not new.isdisjoint(self._arrived):
            return None
        targets: list[Sequence[Target]] = []
        for source in sources:
            targets += [self.units[number].targets for number in self._waiting[source]]
        if len(new) < len(sources) or any(target.worker != to for some in targets for target in some):
            return None
        for source in sources:
            self.start_unshared(source)
        return targets

    def on_release(self, used: Iterable[int], share: CreditShare) -> list[PassAction]:
        """The origin says which sources are used. No unit waits for the others any more."""
        if self.failed:
            return []
        unused = self.sources - frozenset(used) - self._arrived - self._unused
        self._unused |= unused
        self._queue.append((None, unused, share))
        return self._next()

    def on_ran(self, run: Run) -> list[PassAction]:
        """A ``Run`` was performed."""
        if self.failed:
            return []
        self._running = False
        following = self._next()
        targets = [target for number in run.units for target in self.units[number].targets]
        statuses = self._report_status(run.share.statuses)
        if targets:
            return [*passed_on(CreditShare(run.share.credit, statuses), targets), *following]
        return [*self.done_with(CreditShare(run.share.credit, statuses)), *following]

    def done_with(self, share: CreditShare) -> list[PassAction]:
        """Return the share of an event that caused no further messages."""
        return self.on_credit(share) if self.own_rank == self.origin else [GiveBack(share)]

    def on_message(self, series: Series) -> None:
        """A message with gradients arrived, and its gradients are handled from now on."""
        self._awaited += series.following + (not series.announced)

    def on_handled(self) -> list[PassAction]:
        """All that a message has caused on this thread is done: return the credit that was kept."""
        self._awaited -= 1
        if self._awaited > 0 or self._kept is None or self.failed:
            return []
        kept, self._kept = self._kept, None
        return [GiveBack(kept)]

    def keep(self, share: CreditShare) -> bool:
        """Keep a share that is to be returned, if another message is awaited; returns whether it is kept."""
        if self._awaited <= 0:
            return False
        self._kept = share if self._kept is None else self._kept.plus(share)
        return True

    def reach(self, sources: Iterable[int]) -> set[Target]:
        """The targets that can be reached from any of these sources."""
        wanted = set(sources)
        return {target for unit in self.units if not wanted.isdisjoint(unit.sources) for target in unit.targets}

    def fail(self) -> bool:
        """Mark the pass as failed; False if it has failed or ended before."""
        news = not self.failed and not self.ended
        self.failed |= news
        return news

    @property
    def blocked(self) -> bool:
        """Whether a unit that is part of the pass waits for gradients."""
        if self.fast:
            return not self.sources <= self._arrived | self._unused
        return any(
            number not in self._started and not self._arrived.isdisjoint(self.units[number].sources)
            for number in self._shared
        )

    @property
    def active(self) -> bool:
        """Whether the pass is running or waiting on this worker."""
        is_busy = self._running or self._kept is not None or self.blocked or self.own_rank == self.origin
        return not self.failed and not self.ended and is_busy

    @property
    def missing(self) -> frozenset[int]:
        """The sources whose gradients have not arrived, and that are not known to be unused."""
        return self.sources - self._arrived - self._unused

    def _next(self) -> list[PassAction]:
        if self._running or not self._queue:
            return []
        self._running = True
        source, settled, share = self._queue.popleft()
        return [Run(source, self._ready(settled), share)]

    def _ready(self, settled: Iterable[int]) -> tuple[int, ...]:
        ready: list[int] = []
        for source in settled:
            for number in self._waiting.get(source, ()):
                self._missing[number] -= 1
                # A unit without gradients for any of its sources is not part of the pass.
                if not self._missing[number] and not self._arrived.isdisjoint(self.units[number].sources):
                    self._started.add(number)
                    ready.append(number)
        return tuple(ready)

    def _report_status(self, statuses: Statuses) -> Statuses:
        """The statuses to send on, with this worker's own if it has changed since its last report."""
        number, said = self._reported
        blocked = self.blocked
        if blocked == said:
            return statuses
        self._reported = number + 1, blocked
        return {**statuses, self.own_rank: self._reported}

    # At the origin

    def on_credit(self, share: CreditShare) -> list[PassAction]:
        """Credit returned to the origin."""
        if self.failed or self.ended:
            return []
        if share is ALL and not self._statuses:
            # One chain: all of the credit stayed together, and nobody was ever blocked.
            self._recovered = WHOLE
            self.ended = True
            return [Ended()]
        self._recovered = self._recovered.plus(share.credit)
        for worker, status in share.statuses.items():
            if status > self._statuses.get(worker, (0, False)):
                self._statuses[worker] = status
        if not self._recovered.is_whole:
            return []
        blocked = self._blocked_workers()
        if not blocked:
            self.ended = True
            return [Ended()]
        if self.fast:
            return [Stuck(tuple(blocked))]
        return [Survey()] if self._used is None else self._release(self._used)

    def on_surveyed(self, used: Mapping[int, frozenset[int]]) -> list[PassAction]:
        """The survey has found the sends that the roots reach, by worker."""
        if self.failed or self.ended:
            return []
        self._used = used
        return self._release(used)

    def _release(self, used: Mapping[int, frozenset[int]]) -> list[PassAction]:
        """Release the blocked workers that have not been released. The gradients that they send may block others."""
        blocked = [worker for worker in self._blocked_workers() if worker not in self._released]
        if not blocked:
            raise ProtocolError("All blocked workers of a backward pass have been released, and one is still blocked.")
        self._released.update(blocked)
        credits = self._recovered.split(len(blocked))
        self._recovered = NONE
        return [
            Release(worker, used.get(worker, frozenset()), CreditShare(credit, {}))
            for worker, credit in zip(blocked, credits, strict=True)
        ]

    def _blocked_workers(self) -> list[int]:
        return [worker for worker, (_, blocked) in sorted(self._statuses.items()) if blocked]

    def validate(self) -> None:
        queued = {source for _, settled, _ in self._queue for source in settled}
        known = (self._arrived | self._unused) - queued
        for number, unit in enumerate(self.units):
            missing = unit.sources - known
            assert self._missing[number] == len(missing), f"unit {number} miscounts its sources"
            assert number not in self._started or not missing, f"unit {number} ran too early"
        assert self._running or not self._queue, "a queued event does not run"
        assert self._kept is None or self._awaited > 0 or self.failed, "credit is kept, and no message is awaited"
        assert not (self.ended and self.missing and self.blocked), "the pass ended with work left"
        assert not (self.ended and self.failed), "the pass ended and failed"
