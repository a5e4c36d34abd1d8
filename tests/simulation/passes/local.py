"""One pass on one worker: the machine under test. Whatever it is told and whatever it wants goes through here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from farprop.protocol.passes import (
    ALL,
    ROOTS,
    Action,
    Ended,
    GradientPass,
    Run,
    Share,
    Stuck,
    Survey,
    Target,
    passed_on,
)
from tests.simulation.passes import checks
from tests.simulation.passes.forward import Graph
from tests.simulation.passes.stories import PassStory, amount

if TYPE_CHECKING:
    from tests.simulation.passes.world import World


class Straight(NamedTuple):
    """A run on the short way, and where it leads."""

    run: Run
    targets: Sequence[Target]


class Local:
    def __init__(self, world: World, story: PassStory, rank: int, graph: Graph) -> None:
        roots = story.roots if rank == story.id.origin else ()
        reaches = graph.reaches(roots)
        self.world = world
        self.story = story
        self.rank = rank
        self.id = story.id
        self.partners: set[int] = set()
        self.undone = False  # the context's gradients are as they were before the pass
        self.is_watched = world.chance.random() < 0.5 or world.watched  # by a profiler, say
        self.machine = GradientPass(rank, story.id.origin, story.fast, graph.units(reaches), frozenset(reaches))
        checks.met(self)
        story.locals[rank] = self

    def start(self) -> list[Action]:
        return self._wanted(self.machine.failed, self.machine.come(ROOTS, ALL))

    def straight(self, source: int, share: Share) -> Straight | None:
        """The short way, unless somebody looks on."""
        if self.is_watched:
            return None
        targets = self.machine.straight(source)
        if targets is None:
            return None
        if source == ROOTS:
            self.story.loose += amount(share.credit)
        units = [number for number, unit in enumerate(self.machine.units) if unit.sources == {source}]
        return Straight(Run(source, tuple(units), share), targets)

    def end_straight(self, straight: Straight) -> list[Action]:
        run = straight.run
        self.story.running[self.rank] -= 1
        self.story.ran.setdefault(self.rank, set()).update(run.units)
        self._take(run.share)
        had_failed = self.machine.failed
        if had_failed:
            return self._wanted(had_failed, [])
        actions = passed_on(run.share, straight.targets) if straight.targets else self.machine.done_with(run.share)
        return self._wanted(had_failed, actions)

    def come(self, source: int, share: Share) -> list[Action]:
        self._take(share)
        return self._wanted(self.machine.failed, self.machine.come(source, share))

    def release(self, used: Iterable[int], share: Share) -> list[Action]:
        self._take(share)
        return self._wanted(self.machine.failed, self.machine.release(used, share))

    def returned(self, share: Share) -> list[Action]:
        self._take(share)
        return self._wanted(self.machine.failed, self.machine.returned(share))

    def surveyed(self, used: dict[int, frozenset[int]]) -> list[Action]:
        return self._wanted(self.machine.failed, self.machine.surveyed(used))

    def begin(self, run: Run) -> None:
        checks.begins(self, run)
        self.story.running[self.rank] += 1

    def end(self, run: Run) -> list[Action]:
        self.story.running[self.rank] -= 1
        self.story.ran.setdefault(self.rank, set()).update(run.units)
        self._take(run.share)
        return self._wanted(self.machine.failed, self.machine.ran(run))

    def fail(self) -> bool:
        self.world.touched[self] = None
        return self.machine.fail()

    def _take(self, share: Share) -> None:
        self.story.loose -= amount(share.credit)

    def _wanted(self, had_failed: bool, actions: list[Action]) -> list[Action]:
        self.world.touched[self] = None
        if had_failed and actions:
            raise checks.Violation(f"{self.story} has failed on worker {self.rank}, which still wants {actions}")
        for action in actions:
            if isinstance(action, Ended):
                checks.ended(self.world, self.story)
            elif isinstance(action, Survey | Stuck):
                checks.rests(self.story, action)
            else:
                self.story.loose += amount(action.share.credit)
        return actions
