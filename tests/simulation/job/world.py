"""One run: everything that follows from a seed."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from typing import NamedTuple

import torch

from tests.simulation.harness import Outcome
from tests.simulation.job import checks, install, program
from tests.simulation.job.group import Group
from tests.simulation.job.network import TCP, UNIX, Network
from tests.simulation.job.process import Process, Store
from tests.simulation.job.scheduler import Mode, Violation, scheduler

# A job that has not ended this many seconds after its last fault never does.
LIMIT = 2000.0


class Faults(NamedTuple):
    """Probabilities and numbers of faults. Many runs have none."""

    slow: float  # how often a message takes long
    timeouts: float  # how often a call has a short timeout
    breaks: int
    crashes: int
    vanishings: int  # hosts that are gone without a word
    silences: int  # two workers that can't reach each other for a while
    leavings: int
    joinings: int


def draw_faults(rng: random.Random, is_static: bool, is_unix: bool) -> Faults:
    slow = rng.choice((0.0, 0.05, 0.3))
    if rng.random() < 0.3:
        return Faults(slow, 0.0, 0, 0, 0, 0, 0, 0)
    return Faults(
        slow,
        timeouts=rng.choice((0.0, 0.0, 0.3)),
        breaks=rng.choice((0, 0, 1, 3)),
        crashes=rng.choice((0, 1, 1, 2)),
        vanishings=0 if is_unix else rng.choice((0, 0, 0, 1)),
        silences=0 if is_unix else rng.choice((0, 0, 1)),
        leavings=0 if is_static else rng.choice((0, 0, 1)),
        joinings=0 if is_static else rng.choice((0, 1)),
    )


class World:
    def __init__(self, seed: int, tracing: bool) -> None:
        self.tracing = tracing
        self.rng = rng = random.Random(seed)
        self.cancels = random.Random(f"cancels {seed}")
        self.has_cancels = seed % 4 == 0  # the others stay as they were before there were cancels
        # The calls that were cancelled, by caller, callee and id: a connection that is made anew counts anew.
        self.cancelled: dict[tuple[str, str, int], checks.CallHistory] = {}
        self.counts: Counter[str] = Counter()
        self.is_static = rng.random() < 0.35
        self.family = rng.choice((UNIX, TCP))
        self.shares_clock = self.family == UNIX
        self.faults = draw_faults(rng, self.is_static, self.shares_clock)
        self.size = rng.choice((2, 3, 3, 4))
        self.names = [f"w{rank}" for rank in range(self.size)]
        self.weights = {f"w{rank}": float(rank + 2) for rank in range(8)}
        self.processes: list[Process] = []
        self.by_instance: dict[str, Process] = {}
        self.store = Store()
        self.network = Network(self)
        self.calls: dict[int, checks.CallHistory] = {}
        self.values: dict[int, checks.ValueHistory] = {}
        self.watches: list[tuple[Process, Process]] = []
        self.group: Group | None = None
        self.told: set[tuple[Process, Process]] = set()
        self._harm: set[frozenset[str]] = set()  # who was hit by faults: one worker, or two
        self._tokens = itertools.count(1)
        self._pending = 0  # faults to come
        self.busy = 0  # threads of programs that run, on workers that live
        self.trace("%d workers, %s, %s, %s", self.size, self.is_static, self.family, self.faults)

    def trace(self, text: str, *things: object) -> None:
        if self.tracing:
            print(f"{scheduler.now:9.4f}  " + text % things)

    def new_token(self) -> int:
        return next(self._tokens)

    def pause(self) -> float:
        """How long something takes to begin on a thread."""
        rng = self.rng
        return 0.0 if rng.random() < 0.5 else rng.uniform(0.0, 0.001) if rng.random() < 0.95 else rng.uniform(0.0, 0.1)

    def timeout(self) -> float:
        """The timeout of a call; 0 for the default, which is long."""
        return self.rng.uniform(0.001, 0.1) if self.rng.random() < self.faults.timeouts else 0.0

    def live(self) -> list[Process]:
        return [process for process in self.processes if process.is_alive]

    # Running

    def run(self) -> None:
        rng = self.rng
        for rank, name in enumerate(self.names):
            self._start(name, rank)
        self._run_programs()
        seconds = rng.choice((0.1, 0.3, 0.6))
        for process in self.live():
            for _ in range(rng.choice((1, 1, 2))):
                process.run(program.run, process, rng.randint(1, 4))
        if rng.random() < 0.5:
            self.group = Group(self, rng.sample(self.live(), rng.randint(2, len(self.live()))))
        if not self.is_static or rng.random() < 0.3:
            for process in rng.sample(self.live(), rng.randint(0, 2)):
                process.run(program.watch, process)
        faults = self.faults
        for count, action in (
            (faults.breaks, self.network.cut_one),
            (faults.crashes, self._crash),
            (faults.vanishings, self._vanish),
            (faults.silences, self._silence),
            (faults.leavings, self._leave),
            (faults.joinings, self._join),
        ):
            for _ in range(count):
                self._plan(rng.uniform(0.0, seconds), action)
        self._run_programs()
        hasty = rng.random() < 0.3
        if not hasty:
            for process in self.live():
                process.run(program.use_all, process)
            self._run_programs()
            for process in self.live():
                process.run(program.settle, process)
            self._run_programs()
            checks.calls_ended(self)
            if self.group is not None:
                self.group.check()
        for process in self.live():
            if not self.is_static or self.is_troubled:
                self.fault("last leavings", process)  # it does not wait for the calls of others
            process.run(program.leave, process)
        self._run_programs()
        checks.calls_ended(self)
        scheduler.run(lambda: False, LIMIT)
        checks.nothing_runs(self)

    def _run_programs(self) -> None:
        scheduler.run(self._is_done, LIMIT)
        for process in self.live():
            if process.programs:
                raise Violation(f"the program of {process} waits for ever")

    def _is_done(self) -> bool:
        return not self.busy and not self._pending

    def _start(self, name: str, rank: int) -> None:
        process = Process(self, name, rank)
        process.weight = torch.tensor([self.weights[name]], dtype=torch.float64, requires_grad=True)
        process.run(program.join, process)

    # Faults

    def _plan(self, delay: float, action: object, *args: object) -> None:
        self._pending += 1
        scheduler.after(delay, None, Mode.KERNEL, self._do, action, args)

    def _do(self, action: object, args: tuple[object, ...]) -> None:
        self._pending -= 1
        action(*args)  # type: ignore[operator]

    def fault(self, name: str, *processes: Process) -> None:
        self.counts[name] += 1
        self._harm.add(frozenset(process.name for process in processes))

    def excused(self, names: set[str]) -> bool:
        """Whether something that depends on these workers may fail."""
        return any(harmed <= names for harmed in self._harm)

    @property
    def is_troubled(self) -> bool:
        return bool(self._harm)

    def _victims(self) -> list[Process]:
        return [process for process in self.live() if process.has_joined and not process.is_leaving]

    def _crash(self) -> None:
        victims = self._victims()
        if len(victims) > 1:
            self._kill(self.rng.choice(victims))

    def _kill(self, process: Process) -> None:
        self.trace("%s dies", process)
        self.fault("crashes", process)
        process.die()
        self.network.on_crash(process)
        if not self.is_static and self.rng.random() < 0.7:
            self._plan(self.rng.uniform(0.0, 1.0), self._rejoin, process)

    def _rejoin(self, process: Process) -> None:
        self.trace("%s comes back", process.name)
        self.counts["returns"] += 1
        self._begin(process.name, process.rank)

    def _join(self) -> None:
        rank = len({process.name for process in self.processes})
        self.counts["joinings"] += 1
        self._begin(f"w{rank}", rank)

    def _begin(self, name: str, rank: int) -> None:
        self._start(name, rank)
        process = self.processes[-1]
        process.run(self._program_of_newcomer, process)

    def _program_of_newcomer(self, process: Process) -> None:
        while not process.has_joined:
            scheduler.park(0.05)
        if process.name not in self.names:
            self.names.append(process.name)
        program.run(process, self.rng.randint(0, 3))

    def _vanish(self) -> None:
        victims = self._victims()
        if len(victims) > 1:
            process = self.rng.choice(victims)
            self.trace("%s vanishes with its host", process)
            self.fault("vanished hosts", process)
            process.die()
            process.has_vanished = True
            for other in self.processes:
                self.network.silence(process, other)

    def _silence(self) -> None:
        victims = self._victims()
        if len(victims) > 1:
            one, other = self.rng.sample(victims, 2)
            self.trace("%s and %s can't reach each other", one, other)
            self.fault("silences", one, other)
            self.network.silence(one, other)
            self._plan(self.rng.choice((0.1, 1.0, 1.9)), self.network.heal)

    def _leave(self) -> None:
        victims = self._victims()
        if len(victims) > 1:
            process = self.rng.choice(victims)
            self.fault("leavings", process)
            process.run(program.leave, process)


def run(seed: int, tracing: bool = False) -> Outcome:
    """Run a seed. Any exception is a failure, too."""
    install.install()
    scheduler.reset()
    world = World(seed, tracing)
    failure = None
    try:
        world.run()
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        if tracing:
            import traceback

            traceback.print_exc()
    for process in world.processes:
        process.is_dead = True
    scheduler.kill_parked()
    if seed % 50 == 49:
        gc.collect()  # the garbage of runs that are over
    world.counts["steps"] = scheduler.steps
    world.counts["switches"] = scheduler.switches
    return Outcome(seed, failure, world.counts, "job")
