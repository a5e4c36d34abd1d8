"""One run: everything that follows from a seed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import NamedTuple

from tests.simulation import checks, program
from tests.simulation.harness import Clock, Outcome, Violation
from tests.simulation.ledger import Ledger, show
from tests.simulation.network import Network
from tests.simulation.worker import Worker

# A run that is not at rest this long after its programs ended never comes to rest.
MAX_SECONDS = 100.0


class Faults(NamedTuple):
    """Probabilities and numbers of faults. Each is absent from some runs, so that the others also occur without it."""

    loss: float  # of a batch or a reply
    duplication: float  # of a batch or a reply
    slow: float  # how often a message takes very long
    late: float  # how often a call that makes a value takes very long, so that references to the value overtake it
    timeouts: float  # how often a caller gives up early
    unsent: float  # how often a message is never sent
    breaks: int  # connections that break
    partitions: int
    false_deaths: int
    crashes: int
    haste: float  # how often a program passes on a new reference at once


def draw_faults(rng: random.Random) -> Faults:
    deadly = rng.random() < 0.6
    partitions = rng.choice((0, 0, 1, 2))
    false_deaths = rng.choice((0, 1, 2)) if deadly and partitions else 0
    return Faults(
        loss=rng.choice((0.0, 0.1, 0.4)),
        duplication=rng.choice((0.0, 0.1, 0.4)),
        slow=rng.choice((0.0, 0.1, 0.5)),
        late=rng.choice((0.0, 0.7)),
        timeouts=rng.choice((0.0, 0.1, 0.3)),
        unsent=rng.choice((0.0, 0.0, 0.1)),
        breaks=rng.choice((0, 0, 2, 6)),
        partitions=partitions,
        false_deaths=false_deaths,
        crashes=rng.choice((0, 1)) if false_deaths else rng.choice((1, 2, 3)) if deadly else 0,
        haste=rng.choice((0.0, 0.5, 0.8, 0.8)),
    )


class World:
    """One run: its workers, its network, its faults, and its clock."""

    def __init__(self, seed: int, tracing: bool) -> None:
        self.tracing = tracing
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.faults = draw_faults(rng)
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self.touched: set[int] = set()  # the workers whose state machines this event used
        self.network = Network(self)
        self.workers = [Worker(self, rank) for rank in range(rng.choice((2, 3, 4, 4, 5, 5)))]
        self._numbers = itertools.count(1)
        self.trace("%d workers, %s", len(self.workers), self.faults)

    def next_number(self) -> int:
        return next(self._numbers)

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.crashed]

    def trace(self, text: str, *things: object) -> None:
        if self.tracing:
            print(f"{self.clock.now:8.4f}  " + text % tuple(show(thing) for thing in things))

    def run(self) -> None:
        rng, clock, faults = self.rng, self.clock, self.faults
        steps = rng.randint(30, 80)
        seconds = steps * rng.choice((0.005, 0.02, 0.05))
        for _ in range(steps):
            clock.after(rng.uniform(0.0, seconds), program.step, self)
        for _ in range(faults.breaks):
            clock.after(rng.uniform(0.0, seconds), self.network.break_one)
        for index in range(faults.partitions):
            self._plan_partition(seconds, false_death=index < faults.false_deaths)
        for _ in range(faults.crashes):
            clock.after(rng.uniform(0.0, seconds), self._crash, rng.choice((0, 100, 100)))
        clock.after(seconds, self._quiet)
        self._run_dry()
        checks.at_rest(self)
        self.trace("the programs drop everything")
        for worker in self.live():
            held, worker.held = worker.held, []
            for thing in held:
                worker.drop(thing)
        self._after_event()
        self._run_dry()
        checks.nothing_left(self)
        self.counts["kept ids"] += sum(worker.state.num_kept_ids for worker in self.live())

    def _run_dry(self) -> None:
        end = self.clock.now + MAX_SECONDS
        while self.clock.step():
            self._after_event()
            if self.clock.now > end:
                raise Violation("messages are sent for ever")

    def _after_event(self) -> None:
        self.counts["steps"] += 1
        if self.touched:
            for worker in self.live():
                worker.settle()
            checks.every_step(self)
            self.touched.clear()

    # Faults

    def _quiet(self) -> None:
        self.trace("no more faults")
        self.network.quiet = True
        self.network.heal()

    def _plan_partition(self, seconds: float, false_death: bool) -> None:
        start, length = self.rng.uniform(0.0, seconds), self.rng.uniform(0.1, 0.8)
        self.clock.after(start, self.network.partition)
        if false_death:
            self.clock.after(start + length / 2, self._false_death)
        self.clock.after(start + length, self.network.heal)

    def _crash(self, patience: int) -> None:
        """Crash a worker. The others notice at different times, some of them first by a lost connection."""
        live = self.live()
        if len(live) < 2:
            return
        # The worst moment is when it has just passed on a reference to a value that is not made yet. Wait for that.
        risky = [worker for worker in live if self.network.sends_early_forks(worker.rank)]
        if patience and not risky:
            self.clock.after(0.01, self._crash, patience - 1)
            return
        worker = self.rng.choice(risky or live)
        self.trace("%d crashes", worker.rank)
        self.counts["crashes"] += 1
        worker.crashed = True
        self.ledger.crash(worker.rank)
        heard_until = self.network.cut_off(worker.rank)
        for other in self.live():
            delay = self.rng.choice((self.rng.uniform(0.0, 0.1), self.rng.uniform(0.1, 1.0)))
            still_heard = heard_until.get(other.rank, self.clock.now) - self.clock.now
            self.clock.after(still_heard + delay, other.hear_death, worker.rank)

    def _false_death(self) -> None:
        """A worker believes a live one dead. The other notices at the latest when it is refused."""
        pairs = [
            (one, other)
            for one in self.live()
            for other in self.live()
            if self.network.partitioned(one.rank, other.rank) and other.rank not in one.state.dead
        ]
        if pairs:
            one, other = self.rng.choice(pairs)
            self.counts["false deaths"] += 1
            self.ledger.false_death(one.rank, other.rank)
            one.hear_death(other.rank)
            self.clock.after(self.rng.uniform(0.5, 3.0), other.hear_death, one.rank)


def run(seed: int, tracing: bool = False) -> Outcome:
    """Run a seed. Any exception is a failure, too."""
    world = World(seed, tracing)
    try:
        world.run()
    except Exception as error:
        return Outcome(seed, f"{type(error).__name__}: {error}", world.counts)
    return Outcome(seed, None, world.counts)
