"""Mutants of the state machine of backward passes, to see that the simulation kills them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from farprop.protocol.backward import (
    Announcer,
    BackwardStateMachine,
    Credit,
    CreditShare,
    Ended,
    GiveBack,
    PassAction,
    Run,
    Send,
    Series,
    Statuses,
    Target,
)
from tests.simulation.harness import mutant

_HEALTHY: dict[str, Any] = {name: value for name, value in vars(BackwardStateMachine).items() if callable(value)}


def pass_mutant(method: str) -> Any:
    return mutant(BackwardStateMachine, method, kind="passes")


# Credit


@mutant(Credit, "split", kind="passes")
def credit_leaks(self: Credit, count: int) -> list[Credit]:
    """The remainder of a division is lost."""
    bits = (count - 1).bit_length()
    return [Credit(self.parts, self.level + bits)] * count


@mutant(Credit, "split", kind="passes")
def credit_grows(self: Credit, count: int) -> list[Credit]:
    """Two shares are a half each, and so are three."""
    return [self] if count == 1 else [Credit(self.parts, self.level + 1)] * count


@mutant(Credit, "plus", kind="passes")
def levels_ignored(self: Credit, other: Credit) -> Credit:
    """Parts are added as if all had the same size."""
    return Credit(self.parts + other.parts, max(self.level, other.level))


@pass_mutant("on_ran")
def last_share_dropped(self: BackwardStateMachine, run: Run) -> list[PassAction]:
    """Of several messages that follow from a run, the last is not sent."""
    actions = _HEALTHY["on_ran"](self, run)
    sends = [action for action in actions if isinstance(action, Send)]
    return [action for action in actions if len(sends) < 2 or action is not sends[-1]]


@pass_mutant("on_ran")
def credit_of_last_run_kept(self: BackwardStateMachine, run: Run) -> list[PassAction]:
    """A worker whose run has no targets keeps the credit."""
    return [action for action in _HEALTHY["on_ran"](self, run) if not isinstance(action, GiveBack)]


@pass_mutant("_release")
def released_and_kept(self: BackwardStateMachine, used: Mapping[int, frozenset[int]]) -> list[PassAction]:
    """The origin gives credit to released workers, and still counts it as its own."""
    recovered = self._recovered
    actions: list[PassAction] = _HEALTHY["_release"](self, used)
    self._recovered = recovered
    return actions


# Statuses and rest


@pass_mutant("on_credit")
def ends_though_blocked(self: BackwardStateMachine, share: CreditShare) -> list[PassAction]:
    """A pass at rest ends even if a worker is blocked."""
    if self.failed or self.ended:
        return []
    self._recovered = self._recovered.plus(share.credit)
    self.ended = self._recovered.is_whole
    return [Ended()] if self.ended else []


@pass_mutant("_report_status")
def status_not_passed_on(self: BackwardStateMachine, statuses: Statuses) -> Statuses:
    """A worker passes on the credit of others without their statuses."""
    return _HEALTHY["_report_status"](self, {})  # type: ignore[no-any-return]


@pass_mutant("_report_status")
def never_unblocked(self: BackwardStateMachine, statuses: Statuses) -> Statuses:
    """A worker that was blocked never reports that it is unblocked."""
    return _HEALTHY["_report_status"](self, statuses) if not self._reported[1] else statuses


@pass_mutant("on_credit")
def statuses_without_numbers(self: BackwardStateMachine, share: CreditShare) -> list[PassAction]:
    """The status that arrives last counts as the newest."""
    for worker in share.statuses:
        self._statuses.pop(worker, None)
    return _HEALTHY["on_credit"](self, share)  # type: ignore[no-any-return]


@pass_mutant("_report_status")
def two_statuses_are_enough(self: BackwardStateMachine, statuses: Statuses) -> Statuses:
    """A worker that has reported blocked and then unblocked reports nothing more."""
    return _HEALTHY["_report_status"](self, statuses) if self._reported[0] < 2 else statuses


@pass_mutant("_report_status")
def origin_forgets_itself(self: BackwardStateMachine, statuses: Statuses) -> Statuses:
    """The origin does not count itself among the blocked."""
    return statuses if self.own_rank == self.origin else _HEALTHY["_report_status"](self, statuses)


@mutant(Credit, "is_whole", kind="passes")
@property  # type: ignore[misc]
def most_is_all(self: Credit) -> bool:
    """Three quarters of the credit are taken for all of it."""
    return self.parts * 4 >= 3 << self.level


@mutant(BackwardStateMachine, "blocked", kind="passes")
@property  # type: ignore[misc]
def fast_does_not_wait(self: BackwardStateMachine) -> bool:
    """A FAST pass, like a SMART one, does not wait for sends that share no node."""
    return any(n not in self._started and not self._arrived.isdisjoint(u.sources) for n, u in enumerate(self.units))


@mutant(BackwardStateMachine, "blocked", kind="passes")
@property  # type: ignore[misc]
def smart_waits_for_all(self: BackwardStateMachine) -> bool:
    """A SMART pass, like a FAST one, treats a worker as blocked if any of its sends has not arrived."""
    return not self.sources <= self._arrived | self._unused


@pass_mutant("on_ran")
def smart_returns_credit_early(self: BackwardStateMachine, run: Run) -> list[PassAction]:
    """In a SMART pass, workers return some credit whenever they send. The pass ends, but takes more messages."""
    actions: list[PassAction] = _HEALTHY["on_ran"](self, run)
    first = actions[0] if actions else None
    if self.fast or self.own_rank == self.origin or not isinstance(first, Send):
        return actions
    kept, given = first.share.credit.split(2)
    sent = Send(first.target, CreditShare(kept, first.share.statuses))
    return [sent, GiveBack(CreditShare(given, {})), *actions[1:]]


# Units


@pass_mutant("_ready")
def runs_with_the_first_source(self: BackwardStateMachine, settled: Iterable[int]) -> tuple[int, ...]:
    """A unit runs when the first of its sources arrives."""
    settled = tuple(settled)
    _HEALTHY["_ready"](self, settled)
    ready = {n for source in settled if source in self._arrived for n in self._waiting.get(source, ())}
    return tuple(sorted(ready))


@pass_mutant("_ready")
def runs_with_every_source(self: BackwardStateMachine, settled: Iterable[int]) -> tuple[int, ...]:
    """Units that have run run again when a release marks sources as unused."""
    ready: tuple[int, ...] = _HEALTHY["_ready"](self, tuple(settled))
    return ready if self._unused.isdisjoint(settled) else tuple(sorted(self._started))


@pass_mutant("_ready")
def unreached_runs_on_release(self: BackwardStateMachine, settled: Iterable[int]) -> tuple[int, ...]:
    """Units without any arrived source run when all of their sources are known to be unused."""
    settled = tuple(settled)
    ready: tuple[int, ...] = _HEALTHY["_ready"](self, settled)
    left = {n for s in settled for n in self._waiting.get(s, ()) if not self._missing[n] and n not in self._started}
    return (*ready, *sorted(left))


@pass_mutant("_next")
def runs_overlap(self: BackwardStateMachine) -> list[PassAction]:
    """Gradients that arrive during a run do not wait for its end."""
    self._running = False
    return _HEALTHY["_next"](self)  # type: ignore[no-any-return]


@pass_mutant("_next")
def one_run_is_enough(self: BackwardStateMachine) -> list[PassAction]:
    """Of the gradients that arrived during a run, only the first are processed."""
    actions: list[PassAction] = _HEALTHY["_next"](self)
    if actions:
        self._queue.clear()
    return actions


# Surveys and releases


@pass_mutant("reach")
def survey_without_the_shared(self: BackwardStateMachine, sources: Iterable[int]) -> set[Target]:
    """A worker leaves out of its survey answer what several of its sources reach together."""
    wanted = set(sources)
    return {target for unit in self.units if unit.sources <= wanted for target in unit.targets}


@pass_mutant("on_surveyed")
def survey_ignores_a_worker(self: BackwardStateMachine, used: Mapping[int, frozenset[int]]) -> list[PassAction]:
    """The answer of the last worker is ignored."""
    kept = {worker: used[worker] for worker in sorted(used)[:-1]}
    return _HEALTHY["on_surveyed"](self, kept)  # type: ignore[no-any-return]


@pass_mutant("on_release")
def used_taken_for_unused(self: BackwardStateMachine, used: Iterable[int], share: CreditShare) -> list[PassAction]:
    """A released worker no longer waits for any source."""
    return _HEALTHY["on_release"](self, (), share)  # type: ignore[no-any-return]


@pass_mutant("on_release")
def released_for_nothing(self: BackwardStateMachine, used: Iterable[int], share: CreditShare) -> list[PassAction]:
    """A released worker goes on waiting."""
    return _HEALTHY["on_release"](self, self.sources, share)  # type: ignore[no-any-return]


@pass_mutant("on_surveyed")
def survey_ignores_the_origin(self: BackwardStateMachine, used: Mapping[int, frozenset[int]]) -> list[PassAction]:
    """The survey leaves out the origin, so its own sends count as unused."""
    kept = {worker: message_ids for worker, message_ids in used.items() if worker != self.own_rank}
    return _HEALTHY["on_surveyed"](self, kept)  # type: ignore[no-any-return]


@pass_mutant("_release")
def released_once_only(self: BackwardStateMachine, used: Mapping[int, frozenset[int]]) -> list[PassAction]:
    """Workers that block only after others were released are not released."""
    return _HEALTHY["_release"](self, used) if not self._released else []


@pass_mutant("on_credit")
def fast_surveys(self: BackwardStateMachine, share: CreditShare) -> list[PassAction]:
    """A FAST pass releases blocked workers, as a SMART one does."""
    self.fast = False
    return _HEALTHY["on_credit"](self, share)  # type: ignore[no-any-return]


# Failure


@pass_mutant("fail")
def failure_ignored(self: BackwardStateMachine) -> bool:
    """A pass that failed goes on."""
    return not self.failed and not self.ended


@pass_mutant("on_ran")
def sends_after_failure(self: BackwardStateMachine, run: Run) -> list[PassAction]:
    """A run that was active when the pass failed still sends messages."""
    failed, self.failed = self.failed, False
    actions: list[PassAction] = _HEALTHY["on_ran"](self, run)
    self.failed = failed
    return actions


@pass_mutant("on_gradient")
def runs_after_failure(self: BackwardStateMachine, source: int, share: CreditShare) -> list[PassAction]:
    """Gradients that arrive after a failure are run."""
    failed, self.failed = self.failed, False
    actions: list[PassAction] = _HEALTHY["on_gradient"](self, source, share)
    self.failed = failed
    return actions


@pass_mutant("fail")
def failure_undoes_the_end(self: BackwardStateMachine) -> bool:
    """A pass that has ended can still fail."""
    news = not self.failed
    self.failed = True
    return news


# The fast path, where nothing is shared


@pass_mutant("start_unshared")
def shared_taken_for_unshared(self: BackwardStateMachine, source: int) -> Sequence[Target] | None:
    """Shared nodes do not wait for their other sources."""
    self._nothing_shared = not self.fast
    if not self._nothing_shared or self.failed or source not in self.sources or source in self._arrived:
        return None
    self._arrived.add(source)
    numbers = self._waiting[source]
    self._started.update(numbers)
    return [target for number in numbers for target in self.units[number].targets]


@pass_mutant("start_unshared")
def unshared_runs_twice(self: BackwardStateMachine, source: int) -> Sequence[Target] | None:
    """The arrival of a source is not recorded."""
    targets = _HEALTHY["start_unshared"](self, source)
    self._arrived.discard(source)
    return targets  # type: ignore[no-any-return]


@pass_mutant("start_unshared")
def unshared_in_fast(self: BackwardStateMachine, source: int) -> Sequence[Target] | None:
    """A FAST pass takes the fast path too, and reports no worker as waiting."""
    self._nothing_shared = not self._shared
    return _HEALTHY["start_unshared"](self, source)  # type: ignore[no-any-return]


@pass_mutant("start_unshared")
def unshared_after_failure(self: BackwardStateMachine, source: int) -> Sequence[Target] | None:
    """Gradients that arrive after a failure run on the fast path."""
    failed, self.failed = self.failed, False
    targets = _HEALTHY["start_unshared"](self, source)
    self.failed = failed
    return targets  # type: ignore[no-any-return]


@pass_mutant("done_with")
def credit_kept(self: BackwardStateMachine, share: CreditShare) -> list[PassAction]:
    """Credit of a run without targets is not returned."""
    return self.on_credit(share) if self.own_rank == self.origin else []


@pass_mutant("start_together")
def shared_run_together(self: BackwardStateMachine, sources: Sequence[int], to: int | None) -> Any:
    """Sources that share nodes with others run together as soon as they arrive."""
    self._nothing_shared = not self.fast
    if self.failed or self.fast or not self._arrived.isdisjoint(sources):
        return None
    self._arrived.update(sources)
    return [self.units[self._waiting[source][0]].targets for source in sources]


# Credit that is kept


@pass_mutant("on_handled")
def kept_for_ever(self: BackwardStateMachine) -> list[PassAction]:
    """Credit that is kept is never returned."""
    self._awaited -= 1
    return []


@pass_mutant("on_handled")
def kept_statuses_lost(self: BackwardStateMachine) -> list[PassAction]:
    """Credit that was kept returns without the reports of blocked workers."""
    actions: list[PassAction] = _HEALTHY["on_handled"](self)
    return [GiveBack(CreditShare(action.share.credit, {})) for action in actions if isinstance(action, GiveBack)]


@pass_mutant("on_message")
def order_taken_for_granted(self: BackwardStateMachine, series: Series) -> None:
    """A message that is handled before the one that announced it is forgotten."""
    self._awaited = max(self._awaited, 0)
    _HEALTHY["on_message"](self, series)


@pass_mutant("on_message")
def announced_counts_twice(self: BackwardStateMachine, series: Series) -> None:
    """A message that was announced counts when it is announced, and again when it arrives."""
    self._awaited += series.following + 1


@pass_mutant("keep")
def kept_without_need(self: BackwardStateMachine, share: CreditShare) -> bool:
    """Credit is kept although no message is awaited."""
    self._kept = share if self._kept is None else self._kept.plus(share)
    return True


@pass_mutant("keep")
def only_the_last_is_kept(self: BackwardStateMachine, share: CreditShare) -> bool:
    """Credit that is kept replaces what was kept before."""
    kept = self._awaited > 0
    self._kept = share if kept else self._kept
    return kept


_next = Announcer.next


@mutant(Announcer, "next", kind="passes")
def one_too_many_announced(self: Announcer, worker: int) -> Series:
    """The first message of a series announces itself, too."""
    following, announced = _next(self, worker)
    return Series(following + (following > 0), announced)


@mutant(Announcer, "next", kind="passes")
def every_message_announces(self: Announcer, worker: int) -> Series:
    """All messages of a series announce the others."""
    series = _next(self, worker)
    return Series(self._counts[worker] - 1, True) if series.announced else series


@mutant(Announcer, "begin", kind="passes")
def announced_and_not_marked(self: Announcer, targets: Iterable[Target]) -> None:
    """Only the first message of a series says that it belongs to it."""
    self._due = {target.worker for target in targets} - self._begun
