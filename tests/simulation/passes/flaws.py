"""The machines with one thing wrong in them, to see that the checks notice. Each flaw takes the place of a method."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farprop.protocol.credit import Credit
from farprop.protocol.passes import (
    Action,
    Ended,
    GiveBack,
    GradientPass,
    Run,
    Send,
    Share,
    Statuses,
    Target,
)
from tests.simulation.planting import flaw

_HEALTHY: dict[str, Any] = {name: value for name, value in vars(GradientPass).items() if callable(value)}


def pass_flaw(method: str) -> Any:
    return flaw(GradientPass, method, kind="passes")


# Credit


@flaw(Credit, "split", kind="passes")
def credit_leaks(self: Credit, count: int) -> list[Credit]:
    """What does not divide evenly is lost."""
    bits = (count - 1).bit_length()
    return [Credit(self.parts, self.level + bits)] * count


@flaw(Credit, "split", kind="passes")
def credit_grows(self: Credit, count: int) -> list[Credit]:
    """Two shares are a half each, and so are three."""
    return [self] if count == 1 else [Credit(self.parts, self.level + 1)] * count


@flaw(Credit, "plus", kind="passes")
def levels_ignored(self: Credit, other: Credit) -> Credit:
    """Parts are added up as if they were of the same size."""
    return Credit(self.parts + other.parts, max(self.level, other.level))


@pass_flaw("ran")
def last_share_dropped(self: GradientPass, run: Run) -> list[Action]:
    """Of several messages that follow from a run, the last is not sent."""
    actions = _HEALTHY["ran"](self, run)
    sends = [action for action in actions if isinstance(action, Send)]
    return [action for action in actions if len(sends) < 2 or action is not sends[-1]]


@pass_flaw("ran")
def nothing_to_send_nothing_to_say(self: GradientPass, run: Run) -> list[Action]:
    """A worker where a run leads to nothing keeps the credit."""
    return [action for action in _HEALTHY["ran"](self, run) if not isinstance(action, GiveBack)]


@pass_flaw("_release")
def released_and_kept(self: GradientPass) -> list[Action]:
    """The origin gives credit to those it releases, and still counts it as its own."""
    home = self._home
    actions: list[Action] = _HEALTHY["_release"](self)
    self._home = home
    return actions


# Statuses and rest


@pass_flaw("returned")
def ends_though_blocked(self: GradientPass, share: Share) -> list[Action]:
    """At rest the pass has ended, whoever is blocked."""
    if self.failed or self.ended:
        return []
    self._home = self._home.plus(share.credit)
    self.ended = self._home.is_whole
    return [Ended()] if self.ended else []


@pass_flaw("_speak")
def status_not_passed_on(self: GradientPass, statuses: Statuses) -> Statuses:
    """A worker sends on the credit of others without what they said of themselves."""
    return _HEALTHY["_speak"](self, {})  # type: ignore[no-any-return]


@pass_flaw("_speak")
def never_unblocked(self: GradientPass, statuses: Statuses) -> Statuses:
    """A worker that was blocked never says that it is not any more."""
    return _HEALTHY["_speak"](self, statuses) if not self._said[1] else statuses


@pass_flaw("returned")
def statuses_without_numbers(self: GradientPass, share: Share) -> list[Action]:
    """The status that comes last is taken for the newest."""
    for worker in share.statuses:
        self._heard.pop(worker, None)
    return _HEALTHY["returned"](self, share)  # type: ignore[no-any-return]


@pass_flaw("_speak")
def two_statuses_are_enough(self: GradientPass, statuses: Statuses) -> Statuses:
    """A worker that has said that it is blocked, and then that it is not, says nothing any more."""
    return _HEALTHY["_speak"](self, statuses) if self._said[0] < 2 else statuses


@pass_flaw("_speak")
def origin_forgets_itself(self: GradientPass, statuses: Statuses) -> Statuses:
    """The origin does not count itself among the blocked."""
    return statuses if self.me == self.origin else _HEALTHY["_speak"](self, statuses)


@flaw(Credit, "is_whole", kind="passes")
@property  # type: ignore[misc]
def most_is_all(self: Credit) -> bool:
    """Three quarters of the credit are taken for all of it."""
    return self.parts * 4 >= 3 << self.level


@flaw(GradientPass, "blocked", kind="passes")
@property  # type: ignore[misc]
def fast_does_not_wait(self: GradientPass) -> bool:
    """A FAST pass, like a SMART one, does not care for sends that nothing is shared with."""
    return any(n not in self._started and not self._come.isdisjoint(u.sources) for n, u in enumerate(self.units))


@flaw(GradientPass, "blocked", kind="passes")
@property  # type: ignore[misc]
def smart_waits_for_all(self: GradientPass) -> bool:
    """A SMART pass, like a FAST one, takes a worker for blocked if any of its sends has not come."""
    return not self.sources <= self._come | self._unused


@pass_flaw("ran")
def smart_keeps_in_touch(self: GradientPass, run: Run) -> list[Action]:
    """In a SMART pass, workers give some credit back with all that they send. It ends, and takes more messages."""
    actions: list[Action] = _HEALTHY["ran"](self, run)
    first = actions[0] if actions else None
    if self.fast or self.me == self.origin or not isinstance(first, Send):
        return actions
    kept, given = first.share.credit.split(2)
    sent = Send(first.target, Share(kept, first.share.statuses))
    return [sent, GiveBack(Share(given, {})), *actions[1:]]


# Units


@pass_flaw("_ready")
def runs_with_the_first_source(self: GradientPass, settled: Iterable[int]) -> tuple[int, ...]:
    """A unit runs when the first of its sources comes."""
    settled = tuple(settled)
    _HEALTHY["_ready"](self, settled)
    ready = {n for source in settled if source in self._come for n in self._waiting.get(source, ())}
    return tuple(sorted(ready))


@pass_flaw("_ready")
def runs_with_every_source(self: GradientPass, settled: Iterable[int]) -> tuple[int, ...]:
    """A unit that has all of its sources runs again when another thing makes them known as unused."""
    ready: tuple[int, ...] = _HEALTHY["_ready"](self, tuple(settled))
    return ready if self._unused.isdisjoint(settled) else tuple(sorted(self._started))


@pass_flaw("_ready")
def unreached_runs_on_release(self: GradientPass, settled: Iterable[int]) -> tuple[int, ...]:
    """What is left runs when it is known that nothing comes for it any more."""
    settled = tuple(settled)
    ready: tuple[int, ...] = _HEALTHY["_ready"](self, settled)
    left = {n for s in settled for n in self._waiting.get(s, ()) if not self._missing[n] and n not in self._started}
    return (*ready, *sorted(left))


@pass_flaw("_next")
def runs_overlap(self: GradientPass) -> list[Action]:
    """What comes while something runs does not wait."""
    self._running = False
    return _HEALTHY["_next"](self)  # type: ignore[no-any-return]


@pass_flaw("_next")
def one_run_is_enough(self: GradientPass) -> list[Action]:
    """What came while something ran is forgotten, but for the first."""
    actions: list[Action] = _HEALTHY["_next"](self)
    if actions:
        self._queue.clear()
    return actions


# Surveys and releases


@pass_flaw("reach")
def survey_without_the_shared(self: GradientPass, sources: Iterable[int]) -> set[Target]:
    """A worker that is asked what is used does not think of what several of its sources lead to."""
    wanted = set(sources)
    return {target for unit in self.units if unit.sources <= wanted for target in unit.targets}


@pass_flaw("surveyed")
def survey_ignores_a_worker(self: GradientPass, used: Mapping[int, frozenset[int]]) -> list[Action]:
    """What the last worker said is not listened to."""
    kept = {worker: used[worker] for worker in sorted(used)[:-1]}
    return _HEALTHY["surveyed"](self, kept)  # type: ignore[no-any-return]


@pass_flaw("release")
def used_taken_for_unused(self: GradientPass, used: Iterable[int], share: Share) -> list[Action]:
    """A worker that is released waits for nothing any more."""
    return _HEALTHY["release"](self, (), share)  # type: ignore[no-any-return]


@pass_flaw("release")
def released_for_nothing(self: GradientPass, used: Iterable[int], share: Share) -> list[Action]:
    """A worker that is released goes on waiting."""
    return _HEALTHY["release"](self, self.sources, share)  # type: ignore[no-any-return]


@pass_flaw("surveyed")
def survey_ignores_the_origin(self: GradientPass, used: Mapping[int, frozenset[int]]) -> list[Action]:
    """Nobody asks the origin, so that its own sends count as unused."""
    kept = {worker: pairs for worker, pairs in used.items() if worker != self.me}
    return _HEALTHY["surveyed"](self, kept)  # type: ignore[no-any-return]


@pass_flaw("_release")
def released_once_only(self: GradientPass) -> list[Action]:
    """Those that are blocked only when others have been released are not released."""
    return _HEALTHY["_release"](self) if not self._released else []


@pass_flaw("returned")
def fast_surveys(self: GradientPass, share: Share) -> list[Action]:
    """A FAST pass releases those that are blocked, as a SMART one does."""
    self.fast = False
    return _HEALTHY["returned"](self, share)  # type: ignore[no-any-return]


# Failure


@pass_flaw("fail")
def failure_ignored(self: GradientPass) -> bool:
    """A pass that failed goes on."""
    return not self.failed and not self.ended


@pass_flaw("ran")
def sends_after_failure(self: GradientPass, run: Run) -> list[Action]:
    """What was running when the pass failed leads to messages all the same."""
    failed, self.failed = self.failed, False
    actions: list[Action] = _HEALTHY["ran"](self, run)
    self.failed = failed
    return actions


@pass_flaw("come")
def runs_after_failure(self: GradientPass, source: int, share: Share) -> list[Action]:
    """What comes after a failure is run."""
    failed, self.failed = self.failed, False
    actions: list[Action] = _HEALTHY["come"](self, source, share)
    self.failed = failed
    return actions


@pass_flaw("fail")
def failure_undoes_the_end(self: GradientPass) -> bool:
    """A pass that has ended can still fail."""
    news = not self.failed
    self.failed = True
    return news


# The straight way


@pass_flaw("straight")
def straight_around_others(self: GradientPass, source: int) -> Sequence[Target] | None:
    """What is shared does not wait for its other sources."""
    self._is_straight = not self.fast
    if not self._is_straight or self.failed or source not in self.sources or source in self._come:
        return None
    self._come.add(source)
    numbers = self._waiting[source]
    self._started.update(numbers)
    return [target for number in numbers for target in self.units[number].targets]


@pass_flaw("straight")
def straight_twice(self: GradientPass, source: int) -> Sequence[Target] | None:
    """That a source has come is not noted."""
    targets = _HEALTHY["straight"](self, source)
    self._come.discard(source)
    return targets  # type: ignore[no-any-return]


@pass_flaw("straight")
def straight_in_fast(self: GradientPass, source: int) -> Sequence[Target] | None:
    """A FAST pass takes the short way too, and says of nobody that it waits."""
    self._is_straight = not self._shared
    return _HEALTHY["straight"](self, source)  # type: ignore[no-any-return]


@pass_flaw("straight")
def straight_after_failure(self: GradientPass, source: int) -> Sequence[Target] | None:
    """Gradients that come after a failure run all the same."""
    failed, self.failed = self.failed, False
    targets = _HEALTHY["straight"](self, source)
    self.failed = failed
    return targets  # type: ignore[no-any-return]


@pass_flaw("done_with")
def credit_kept(self: GradientPass, share: Share) -> list[Action]:
    """Credit that nothing follows from stays where it is."""
    return self.returned(share) if self.me == self.origin else []
