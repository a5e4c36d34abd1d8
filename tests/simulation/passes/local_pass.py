"""One pass on one worker: a wrapper of the state machine under test that checks its events and actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from farprop.protocol.backward import (
    ALL,
    ROOTS,
    BackwardStateMachine,
    CreditShare,
    Ended,
    PassAction,
    Run,
    Series,
    Stuck,
    Survey,
    Target,
    passed_on,
)
from farprop.wire.message import GradientPart
from tests.simulation.passes import checks
from tests.simulation.passes.forward import Graph
from tests.simulation.passes.history import PassHistory, amount

if TYPE_CHECKING:
    from tests.simulation.passes.world import World


class UnsharedRun(NamedTuple):
    """A run on the fast path, and where its gradients go."""

    run: Run
    targets: Sequence[Target]


class LocalPass:
    def __init__(self, world: World, history: PassHistory, rank: int, graph: Graph) -> None:
        roots = history.roots if rank == history.id.origin else ()
        reaches = graph.reaches(roots)
        self.world = world
        self.history = history
        self.rank = rank
        self.id = history.id
        self.partners: set[int] = set()
        self.undone = False  # the context's gradients are restored
        self.is_profiled = world.rng.random() < 0.5 or world.profiled
        self.machine = BackwardStateMachine(
            rank, history.id.origin, history.fast, graph.units(reaches), frozenset(reaches)
        )
        checks.reached(self)
        history.locals[rank] = self

    def start(self) -> list[PassAction]:
        return self._wanted(self.machine.failed, self.machine.on_gradient(ROOTS, ALL))

    def start_unshared(self, source: int, share: CreditShare) -> UnsharedRun | None:
        """The fast path, if nothing is shared and no profiler runs; else None."""
        if self.is_profiled:
            return None
        targets = self.machine.start_unshared(source)
        if targets is None:
            return None
        if source == ROOTS:
            self.history.loose += amount(share.credit)
        units = [number for number, unit in enumerate(self.machine.units) if unit.sources == {source}]
        return UnsharedRun(Run(source, tuple(units), share), targets)

    def start_together(self, parts: Sequence[GradientPart], to: int) -> list[UnsharedRun] | None:
        """The fast path for several sources that lead to no other worker; else None."""
        if self.is_profiled:
            return None
        started = self.machine.start_together([part.message_id for part in parts], to)
        if started is None:
            return None
        self.world.counts["bundles that run together"] += len(parts) > 1
        runs = []
        for part, targets in zip(parts, started, strict=True):
            units = [number for number, unit in enumerate(self.machine.units) if unit.sources == {part.message_id}]
            runs.append(UnsharedRun(Run(part.message_id, tuple(units), part.share), targets))
        return runs

    def on_message(self, series: Series) -> None:
        self.world.touched[self] = None
        self.machine.on_message(series)

    def keep(self, share: CreditShare) -> bool:
        """Whether credit that is to be returned is kept for a while."""
        self.world.touched[self] = None
        kept = self.machine.keep(share)
        if kept:
            self.world.counts["kept credit"] += 1
            self._take(share)
        return kept

    def on_handled(self) -> list[PassAction]:
        return self._wanted(self.machine.failed, self.machine.on_handled())

    def end_unshared(self, unshared: UnsharedRun) -> list[PassAction]:
        run = unshared.run
        self.history.running[self.rank] -= 1
        self.history.ran.setdefault(self.rank, set()).update(run.units)
        self._take(run.share)
        had_failed = self.machine.failed
        if had_failed:
            return self._wanted(had_failed, [])
        actions = passed_on(run.share, unshared.targets) if unshared.targets else self.machine.done_with(run.share)
        return self._wanted(had_failed, actions)

    def on_gradient(self, source: int, share: CreditShare) -> list[PassAction]:
        self._take(share)
        return self._wanted(self.machine.failed, self.machine.on_gradient(source, share))

    def on_release(self, used: Iterable[int], share: CreditShare) -> list[PassAction]:
        self._take(share)
        return self._wanted(self.machine.failed, self.machine.on_release(used, share))

    def on_credit(self, share: CreditShare) -> list[PassAction]:
        self._take(share)
        return self._wanted(self.machine.failed, self.machine.on_credit(share))

    def on_surveyed(self, used: dict[int, frozenset[int]]) -> list[PassAction]:
        return self._wanted(self.machine.failed, self.machine.on_surveyed(used))

    def begin(self, run: Run) -> None:
        checks.begins(self, run)
        self.history.running[self.rank] += 1

    def end(self, run: Run) -> list[PassAction]:
        self.history.running[self.rank] -= 1
        self.history.ran.setdefault(self.rank, set()).update(run.units)
        self._take(run.share)
        return self._wanted(self.machine.failed, self.machine.on_ran(run))

    def fail(self) -> bool:
        self.world.touched[self] = None
        return self.machine.fail()

    def _take(self, share: CreditShare) -> None:
        self.history.loose -= amount(share.credit)

    def _wanted(self, had_failed: bool, actions: list[PassAction]) -> list[PassAction]:
        self.world.touched[self] = None
        if had_failed and actions:
            raise checks.Violation(f"{self.history} has failed on worker {self.rank}, which still wants {actions}")
        for action in actions:
            if isinstance(action, Ended):
                checks.ended(self.world, self.history)
            elif isinstance(action, Survey | Stuck):
                checks.at_rest_but_blocked(self.history, action)
            else:
                self.history.loose += amount(action.share.credit)
        return actions
