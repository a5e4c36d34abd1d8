"""One backward pass, as one worker runs it. Rules that hold here:

- A unit of the local graph runs once, when all of its sources have come, but for those that are known never to.
- One thing runs at a time, so that what a unit waits for has been computed and not only come. Where no unit waits for
  anything, sources may take the ``straight`` way, at the same time.
- What a unit leads to is sent once. A pass ends when all credit is back at its origin and no worker is blocked.
- After a failure nothing is run or sent any more.

Events are methods; what has to be done is returned. Not thread-safe: the caller sees to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from farprop.protocol.credit import NONE, WHOLE, Credit

ROOTS = 0  # the source that the caller of backward provides; pairs have other numbers


class PassId(NamedTuple):
    origin: int
    number: int


class Target(NamedTuple):
    """The send that a receive got its tensors from: where gradients go."""

    worker: int
    pair: int


class Unit(NamedTuple):
    """Nodes that the same sources reach, and the receives among them."""

    sources: frozenset[int]
    targets: tuple[Target, ...]


# Which workers are blocked, by rank: the number of the statement, which grows, and whether.
Statuses = dict[int, tuple[int, bool]]


class Share(NamedTuple):
    """Credit, and what travels with it."""

    credit: Credit
    statuses: Statuses

    def plus(self, other: Share) -> Share:
        """Both in one, with what was said last of each worker."""
        statuses = dict(self.statuses)
        for worker, status in other.statuses.items():
            if status > statuses.get(worker, (0, False)):
                statuses[worker] = status
        return Share(self.credit.plus(other.credit), statuses)


ALL = Share(WHOLE, {})  # what the origin starts with


class Run(NamedTuple):
    """Feed the gradients of ``source`` (None: of none) to the graph, run these units, then say so with ``ran``."""

    source: int | None
    units: tuple[int, ...]
    share: Share


class Send(NamedTuple):
    """Send the gradients for this target."""

    target: Target
    share: Share


class GiveBack(NamedTuple):
    """Send this to the origin."""

    share: Share


class Release(NamedTuple):
    """Tell a blocked worker which of its sources are used."""

    worker: int
    used: frozenset[int]
    share: Share


class Survey(NamedTuple):
    """Find out which sends the roots reach, then call ``surveyed``."""


class Stuck(NamedTuple):
    """A FAST pass can't end: these workers wait for gradients that never come."""

    workers: tuple[int, ...]


class Ended(NamedTuple):
    """The pass is complete on every worker."""


Action = Run | Send | GiveBack | Release | Survey | Stuck | Ended


def passed_on(share: Share, targets: Sequence[Target]) -> list[Action]:
    """Gradients to all targets, with a share each. The statuses go with one of them: they are home when all the credit
    is.
    """
    credits = share.credit.split(len(targets))
    sends: list[Action] = [Send(target, Share(credit, {})) for target, credit in zip(targets, credits, strict=True)]
    sends[0] = Send(targets[0], Share(credits[0], share.statuses))
    return sends


class UnknownSource(Exception):
    """A gradient came for something that was never sent, or came twice."""


class GradientPass:
    """See the module's rules. ``units`` and ``sources`` describe the worker's graph when the pass came to it."""

    def __init__(self, me: int, origin: int, fast: bool, units: Sequence[Unit], sources: frozenset[int]) -> None:
        self.me = me
        self.origin = origin
        self.fast = fast
        self.units = units
        self.sources = sources
        self.failed = False
        self.ended = False
        self._come: set[int] = set()
        self._unused: set[int] = set()
        self._started: set[int] = set()
        self._missing = [len(unit.sources) for unit in units]  # for each unit, how many sources are still to come
        self._waiting: dict[int, list[int]] = {}  # for each source the units that it is one of
        for number, unit in enumerate(units):
            for source in unit.sources:
                self._waiting.setdefault(source, []).append(number)
        self._shared = [number for number, unit in enumerate(units) if len(unit.sources) > 1]
        self._is_straight = not fast and not self._shared
        self._running = False
        self._queue: deque[tuple[int | None, frozenset[int], Share]] = deque()
        self._said = (0, False)
        self._home = NONE
        self._heard: Statuses = {}
        self._used: Mapping[int, frozenset[int]] | None = None  # the sends that the roots reach, once that is known
        self._released: set[int] = set()  # workers

    # At any worker

    def come(self, source: int, share: Share) -> list[Action]:
        """The gradients of a source came. At the origin the roots are the first of them, with ``ALL``."""
        if self.failed:
            return []
        if source not in self.sources or source in self._come:
            raise UnknownSource
        self._come.add(source)
        self._queue.append((source, frozenset((source,)), share))
        return self._next()

    def straight(self, source: int) -> Sequence[Target] | None:
        """The gradients of a source came, and nothing here is shared: run what is behind them, then pass the share that
        came on to these targets, if any; else it is done with. None: it is not so simple, and ``come`` decides.
        """
        if not self._is_straight or self.failed or source not in self.sources or source in self._come:
            return None
        self._come.add(source)
        (number,) = self._waiting[source]
        self._missing[number] = 0
        self._started.add(number)
        return self.units[number].targets

    def release(self, used: Iterable[int], share: Share) -> list[Action]:
        """Only these sources are used: nothing waits for the others any more."""
        if self.failed:
            return []
        unused = self.sources - frozenset(used) - self._come - self._unused
        self._unused |= unused
        self._queue.append((None, unused, share))
        return self._next()

    def ran(self, run: Run) -> list[Action]:
        """What ``run`` asked for is done."""
        if self.failed:
            return []
        self._running = False
        following = self._next()
        targets = [target for number in run.units for target in self.units[number].targets]
        statuses = self._speak(run.share.statuses)
        if targets:
            return [*passed_on(Share(run.share.credit, statuses), targets), *following]
        return [*self.done_with(Share(run.share.credit, statuses)), *following]

    def done_with(self, share: Share) -> list[Action]:
        """Nothing follows from what came with this share."""
        return self.returned(share) if self.me == self.origin else [GiveBack(share)]

    def reach(self, sources: Iterable[int]) -> set[Target]:
        """The targets that any of these sources leads to."""
        wanted = set(sources)
        return {target for unit in self.units if not wanted.isdisjoint(unit.sources) for target in unit.targets}

    def fail(self) -> bool:
        """Something went wrong. Whether that is news; to a pass that has ended it is not."""
        news = not self.failed and not self.ended
        self.failed |= news
        return news

    @property
    def blocked(self) -> bool:
        """Something here waits for gradients."""
        if self.fast:
            return not self.sources <= self._come | self._unused
        return any(
            number not in self._started and not self._come.isdisjoint(self.units[number].sources)
            for number in self._shared
        )

    @property
    def active(self) -> bool:
        """Something here runs or waits."""
        return not self.failed and not self.ended and (self._running or self.blocked or self.me == self.origin)

    @property
    def missing(self) -> frozenset[int]:
        """The sources that have neither come nor been found to be unused."""
        return self.sources - self._come - self._unused

    def _next(self) -> list[Action]:
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
                # What none of its sources has come to is not part of the pass.
                if not self._missing[number] and not self._come.isdisjoint(self.units[number].sources):
                    self._started.add(number)
                    ready.append(number)
        return tuple(ready)

    def _speak(self, statuses: Statuses) -> Statuses:
        """The statuses to send on, with this worker's own if it has changed since it was last said."""
        number, said = self._said
        blocked = self.blocked
        if blocked == said:
            return statuses
        self._said = number + 1, blocked
        return {**statuses, self.me: self._said}

    # At the origin

    def returned(self, share: Share) -> list[Action]:
        """Credit came back."""
        if self.failed or self.ended:
            return []
        self._home = self._home.plus(share.credit)
        for worker, status in share.statuses.items():
            if status > self._heard.get(worker, (0, False)):
                self._heard[worker] = status
        if not self._home.is_whole:
            return []
        blocked = self._blocked_workers()
        if not blocked:
            self.ended = True
            return [Ended()]
        if self.fast:
            return [Stuck(tuple(blocked))]
        return [Survey()] if self._used is None else self._release()

    def surveyed(self, used: Mapping[int, frozenset[int]]) -> list[Action]:
        """These sends, by worker, are all that the roots reach."""
        if self.failed or self.ended:
            return []
        self._used = used
        return self._release()

    def _release(self) -> list[Action]:
        """Tell those who are blocked and have not been told. What they then send may come to others and block them."""
        assert self._used is not None
        blocked = [worker for worker in self._blocked_workers() if worker not in self._released]
        assert blocked, "all who are blocked know what is used, and still nothing runs"
        self._released.update(blocked)
        credits = self._home.split(len(blocked))
        self._home = NONE
        return [
            Release(worker, self._used.get(worker, frozenset()), Share(credit, {}))
            for worker, credit in zip(blocked, credits, strict=True)
        ]

    def _blocked_workers(self) -> list[int]:
        return [worker for worker, (_, blocked) in sorted(self._heard.items()) if blocked]

    def validate(self) -> None:
        for number, unit in enumerate(self.units):
            queued = {source for _, settled, _ in self._queue for source in settled}
            missing = unit.sources - ((self._come | self._unused) - queued)
            assert self._missing[number] == len(missing), f"unit {number} miscounts its sources"
            assert number not in self._started or not missing, f"unit {number} ran too early"
        assert self._running or not self._queue, "something could run and does not"
        assert not (self.ended and self.missing and self.blocked), "the pass ended with work left"
        assert not (self.ended and self.failed), "the pass ended and failed"
