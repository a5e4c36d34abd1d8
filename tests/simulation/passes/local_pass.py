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
from farprop.protocol.needed_sends import Needed, Reached
from farprop.wire.message import GradientPart
from tests.simulation.passes import checks
from tests.simulation.passes.forward import Graph, Node
from tests.simulation.passes.history import PassHistory, amount
from tests.simulation.passes.threads import PassError

if TYPE_CHECKING:
    from tests.simulation.passes.world import World


class UnsharedRun(NamedTuple):
    """A run on the fast path, and where its gradients go."""

    run: Run
    targets: Sequence[Target]


class LocalPass:
    def __init__(self, world: World, history: PassHistory, rank: int, graph: Graph) -> None:
        self._roots = history.roots if rank == history.id.origin else ()
        reaches = graph.reaches(self._roots) if history.inputs is None else {}
        self.world = world
        self.graph = graph
        # Of a recorded pass: the gradients of each source and for each target, all values made here, and the messages.
        self.arrived: dict[int, int] = {}
        self.made: dict[Target, int] = {}
        self.values: list[int] = []
        self.recorded_sends: list[int] = []
        self.history = history
        self.rank = rank
        self.id = history.id
        self.partners: set[int] = set()
        self.undone = False  # the context's gradients are restored
        self.is_profiled = world.rng.random() < 0.5 or world.profiled or history.recorded
        self.machine = BackwardStateMachine(
            rank, history.id.origin, history.fast, graph.units(reaches), frozenset(reaches)
        )
        checks.reached(self)
        history.locals[rank] = self

    # A pass to some inputs

    def reached_by(self, sources: Iterable[int]) -> list[Reached]:
        inputs = (self.history.inputs or {}).get(self.rank, frozenset())
        reaches = self.graph.reaches(self._roots)
        return [
            Reached(frozenset(self.graph.targets(reaches[source])), not inputs.isdisjoint(reaches[source]))
            for source in sources
        ]

    def prepare(self, needed: Needed) -> None:
        if self.machine.failed:
            raise PassError("the pass has ended with an error")
        inputs = (self.history.inputs or {}).get(self.rank, frozenset())
        leading = self.graph.leading(inputs, needed.targets)
        every = self.graph.reaches(self._roots)
        reaches = {source: every[source] & leading for source in sorted(needed.sources)}
        units = self.graph.units(reaches, needed.targets)
        self.machine = BackwardStateMachine(self.rank, self.id.origin, False, units, frozenset(reaches))
        self.world.touched[self] = None

    # A recorded pass

    def _record(self, run: Run) -> None:
        """The gradients that a run makes depend on those that arrived, and on values of the forward pass."""
        for number in run.units:
            unit = self.machine.units[number]
            inputs = {self.arrived[source] for source in unit.sources if source in self.arrived}
            forward = sorted(
                {n for source in unit.sources if source != ROOTS for n in self.graph.sends.get(source, ())}
                or set(self._roots)
            )
            inputs.update(self.world.rng.sample(forward, min(len(forward), 2)))
            value = self._hide(self.graph.add(Node(tuple(sorted(inputs)))))
            for target in unit.targets:
                self.made[target] = value

    def record_send(self, targets: Sequence[Target]) -> int:
        """A message with the gradients for these targets; returns its id, or 0 if the pass is not recorded."""
        if not self.history.recorded:
            return 0
        message_id = self.world.next_message_id(self.rank)
        self.graph.sends[message_id] = tuple(sorted({self.made[target] for target in targets}))
        self.recorded_sends.append(message_id)
        if self.machine.failed:
            self.graph.forget((message_id,))
        return message_id

    def record_arrival(self, sources: Iterable[int], sender: int, message_id: int) -> None:
        """Gradients arrived in a message of the context."""
        if message_id:
            value = self._hide(self.graph.add(Node((), Target(sender, message_id))))
            self.arrived.update(dict.fromkeys(sources, value))

    def _hide(self, value: int) -> int:
        self.values.append(value)
        self.graph.hidden.add(value)
        return value

    def show(self) -> None:
        """The pass has ended: programs may use its gradients."""
        self.graph.hidden.difference_update(self.values)

    def undo(self) -> None:
        """The pass has failed."""
        self.fail()
        self.undone = True
        self.graph.forget(self.recorded_sends)

    def start(self) -> list[PassAction]:
        self.history.began = True
        return self._wanted(self.machine.failed, self.machine.on_gradient(ROOTS, ALL))

    def start_unshared(self, source: int, share: CreditShare) -> UnsharedRun | None:
        """The fast path, if nothing is shared and no profiler runs; else None."""
        if self.is_profiled:
            return None
        targets = self.machine.start_unshared(source)
        if targets is None:
            return None
        if source == ROOTS:
            self.history.began = True
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
        if self.history.recorded:
            self._record(run)
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
