"""One run: everything that follows from a seed."""

from __future__ import annotations

import itertools
import random
from collections import Counter

from tests.simulation import checks, program
from tests.simulation.clock import Clock
from tests.simulation.ledger import Ledger, Violation
from tests.simulation.names import show
from tests.simulation.network import Network
from tests.simulation.outcome import Outcome
from tests.simulation.weather import draw
from tests.simulation.worker import Worker

# A run that is not at rest this long after its programs ended never will be.
MAX_SECONDS = 100.0


class World:
    def __init__(self, seed: int, tracing: bool) -> None:
        self.tracing = tracing
        self.chance = chance = random.Random(seed)
        self.clock = Clock()
        self.weather = draw(chance)
        self.ledger = Ledger()
        self.counts: Counter[str] = Counter()
        self.touched: set[int] = set()  # the workers with whose machines this event had to do
        self.network = Network(self)
        self.workers = [Worker(self, rank) for rank in range(chance.choice((2, 3, 4, 4, 5, 5)))]
        self._numbers = itertools.count(1)
        self.say("%d workers, %s", len(self.workers), self.weather)

    def next_number(self) -> int:
        return next(self._numbers)

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.crashed]

    def say(self, text: str, *things: object) -> None:
        if self.tracing:
            print(f"{self.clock.now:8.4f}  " + text % tuple(show(thing) for thing in things))

    def run(self) -> None:
        chance, clock, weather = self.chance, self.clock, self.weather
        steps = chance.randint(30, 80)
        seconds = steps * chance.choice((0.005, 0.02, 0.05))
        for _ in range(steps):
            clock.after(chance.uniform(0.0, seconds), program.step, self)
        for _ in range(weather.breaks):
            clock.after(chance.uniform(0.0, seconds), self.network.break_one)
        for index in range(weather.partitions):
            self._plan_partition(seconds, divorce=index < weather.divorces)
        for _ in range(weather.crashes):
            clock.after(chance.uniform(0.0, seconds), self._crash, chance.choice((0, 100, 100)))
        clock.after(seconds, self._quiet)
        self._run_dry()
        checks.calm(self)
        self.say("the programs drop everything")
        for worker in self.live():
            held, worker.held = worker.held, []
            for thing in held:
                worker.drop(thing)
        self._after_event()
        self._run_dry()
        checks.empty(self)
        self.counts["kept ids"] += sum(checks.kept_ids(worker) for worker in self.live())

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
        self.say("no more faults")
        self.network.quiet = True
        self.network.heal()

    def _plan_partition(self, seconds: float, divorce: bool) -> None:
        start, length = self.chance.uniform(0.0, seconds), self.chance.uniform(0.1, 0.8)
        self.clock.after(start, self.network.part)
        if divorce:
            self.clock.after(start + length / 2, self._divorce)
        self.clock.after(start + length, self.network.heal)

    def _crash(self, patience: int) -> None:
        """A worker vanishes. The others hear of it in their time, some of them first that the connection is lost."""
        live = self.live()
        if len(live) < 2:
            return
        # The worst moment is when it has just passed on what is not made yet. Wait for it for a while.
        risky = [worker for worker in live if self.network.passes_on_early(worker.rank)]
        if patience and not risky:
            self.clock.after(0.01, self._crash, patience - 1)
            return
        worker = self.chance.choice(risky or live)
        self.say("%d crashes", worker.rank)
        self.counts["crashes"] += 1
        worker.crashed = True
        self.ledger.crash(worker.rank)
        heard_until = self.network.cut_off(worker.rank)
        for other in self.live():
            delay = self.chance.choice((self.chance.uniform(0.0, 0.1), self.chance.uniform(0.1, 1.0)))
            still_heard = heard_until.get(other.rank, self.clock.now) - self.clock.now
            self.clock.after(still_heard + delay, other.hear_death, worker.rank)

    def _divorce(self) -> None:
        """A worker takes another one for dead that is not. That one notices when it is refused, if not before."""
        pairs = [
            (one, other)
            for one in self.live()
            for other in self.live()
            if self.network.apart(one.rank, other.rank) and other.rank not in one.state.dead
        ]
        if pairs:
            one, other = self.chance.choice(pairs)
            self.counts["divorces"] += 1
            self.ledger.divorce(one.rank, other.rank)
            one.hear_death(other.rank)
            self.clock.after(self.chance.uniform(0.5, 3.0), other.hear_death, one.rank)


def run(seed: int, tracing: bool = False) -> Outcome:
    """Run a seed. Whatever the machine raises is a failure, too."""
    world = World(seed, tracing)
    try:
        world.run()
    except Exception as error:
        return Outcome(seed, f"{type(error).__name__}: {error}", world.counts)
    return Outcome(seed, None, world.counts)
