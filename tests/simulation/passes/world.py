"""One run: everything that follows from a seed."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

from farprop.protocol.backward import PassId
from tests.simulation.harness import Clock, Outcome, Violation
from tests.simulation.passes import checks, forward
from tests.simulation.passes.history import PassHistory
from tests.simulation.passes.local_pass import LocalPass
from tests.simulation.passes.network import Network
from tests.simulation.passes.origin import backward
from tests.simulation.passes.threads import Steps, start
from tests.simulation.passes.worker import Worker

MAX_SECONDS = 2000.0  # beside the passes, which have deadlines: for faults, aborts, and the end of the context
_COUNTER_BITS = 48


class Faults(NamedTuple):
    """Probabilities and numbers of faults. Many runs have none."""

    slow: float  # how often a message or a run takes very long
    breaks: int  # connections that break
    crashes: int
    failing: float  # how often a run raises
    timeouts: float  # how often a call with gradients is given up early
    hurried: float  # how often a pass has little time

    @property
    def clear(self) -> bool:
        return not (self.breaks or self.crashes or self.failing or self.timeouts or self.hurried)


def draw_faults(rng: random.Random) -> Faults:
    slow = rng.choice((0.0, 0.1, 0.4))
    if rng.random() < 0.35:
        return Faults(slow, 0, 0, 0.0, 0.0, 0.0)
    return Faults(
        slow=slow,
        breaks=rng.choice((0, 0, 1, 4)),
        crashes=rng.choice((0, 1, 1, 2)),
        failing=rng.choice((0.0, 0.0, 0.0, 0.1)),
        timeouts=rng.choice((0.0, 0.0, 0.0, 0.05)),
        hurried=rng.choice((0.0, 0.0, 0.0, 0.5)),
    )


class World:
    """``swapped``: FAST passes are SMART ones, and the other way round. ``profiled``: all passes are profiled."""

    def __init__(self, seed: int, tracing: bool, swapped: bool = False, profiled: bool = False) -> None:
        self.tracing = tracing
        self.swapped = swapped
        self.profiled = profiled
        self.rng = rng = random.Random(seed)
        self.clock = Clock()
        self.faults = draw_faults(rng)
        self.counts: Counter[str] = Counter()
        self.touched: dict[LocalPass, None] = {}  # whose state machines this event used
        self.histories: list[PassHistory] = []
        self.network = Network(self)
        self.workers = [Worker(self, rank) for rank in range(rng.choice((2, 3, 4, 5, 5)))]
        self.maker = rng.randrange(len(self.workers))
        self.bundled = rng.choice((0.0, 0.9))  # how often gradients are small enough to travel with others
        self.is_sparse = rng.random() < 0.5  # workers send only to their neighbours in a tree
        same = self.is_sparse or rng.random() < 0.8
        self.main_rank = self.maker if same else rng.randrange(len(self.workers))  # most passes start here
        self.next_hops = self._tree()
        self._faults = [self.network.break_one] * self.faults.breaks + [self._crash] * self.faults.crashes
        rng.shuffle(self._faults)
        self._message_ids = 0
        self.quiet_at = 0.0  # when all passes have ended or failed, and their messages have arrived
        self.trace("%d workers, %s", len(self.workers), self.faults)

    def live(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.crashed]

    def next_message_id(self, rank: int) -> int:
        self._message_ids += 1
        return (rank << _COUNTER_BITS) + self._message_ids

    def history(self, pass_id: PassId) -> PassHistory:
        return next(history for history in self.histories if history.id == pass_id)

    def trace(self, text: str, *things: object) -> None:
        if self.tracing:
            print(f"{self.clock.now:8.4f}  " + text % things)

    def _tree(self) -> dict[int, int]:
        """For each other worker, the next hop to the main worker. Mostly a line."""
        rng = self.rng
        reached = [self.main_rank]
        ways: dict[int, int] = {}
        for rank in rng.sample(range(len(self.workers)), len(self.workers)):
            if rank != self.main_rank:
                ways[rank] = reached[-1] if rng.random() < 0.8 else rng.choice(reached)
                reached.append(rank)
        return ways

    def peers(self, rank: int) -> list[int]:
        """The workers that a worker sends values to."""
        if not self.is_sparse:
            return list(range(len(self.workers)))
        return [other for pair in self.next_hops.items() if rank in pair for other in pair if other != rank]

    def run(self) -> None:
        rng, clock = self.rng, self.clock
        self._forward()
        for _ in range(rng.choice((1, 1, 2))):
            worker = self.workers[self.main_rank] if rng.random() < 0.7 else self._any_with_context()
            clock.after(rng.uniform(0.0, 0.1), self._start_program, worker)
        self._run_dry()
        checks.at_rest(self)
        self._count_passes()
        if not self.workers[self.maker].crashed:
            if self.faults.crashes and rng.random() < 0.5:
                clock.after(rng.uniform(0.0, 0.05), self._crash)
            self.workers[self.maker].on_release()
        self._run_dry()
        checks.cleaned_up(self)

    def _count_passes(self) -> None:
        for history in self.histories:
            self.counts["FAST" if history.fast else "SMART"] += 1
            self.counts["complete"] += history.is_complete
            self.counts["recorded"] += history.recorded
            self.counts["to inputs"] += history.inputs is not None
            self.counts[{"": "cut short", "late": "stuck"}.get(history.outcome, history.outcome)] += 1

    def _forward(self) -> None:
        rng = self.rng
        self.workers[self.maker].meet()
        if self.main_rank != self.maker:
            forward.message(self, self.maker, self.main_rank, (0,))
        if rng.random() < 0.15:
            forward.chains(self)
        elif self.is_sparse and rng.random() < 0.4:
            for _ in range(rng.randint(1, 4)):
                forward.pipeline(self)
        elif rng.random() < 0.4:
            forward.parallel(self)
        else:
            for _ in range(rng.choice((2, 10, 20, 30))):
                forward.grow(self)
        if rng.random() < 0.5:
            forward.gather(self)
        elif rng.random() < 0.4:
            for _ in range(rng.randint(1, 5)):  # meanwhile, a program continues in the same context
                self.clock.after(rng.uniform(0.0, 0.3), self._grow)

    def _grow(self) -> None:
        if any(worker.context is not None for worker in self.live()):
            forward.grow(self)

    def _any_with_context(self) -> Worker:
        return self.rng.choice([worker for worker in self.workers if worker.context is not None])

    # Programs

    def _start_program(self, worker: Worker) -> None:
        if not worker.crashed:
            start(worker, self._program(worker))

    def _program(self, worker: Worker) -> Steps:
        """Passes one after the other."""
        rng = self.rng
        for _ in range(rng.choice((1, 1, 2, 3, 4))):
            if worker.context is None:
                return
            graph = worker.context.graph
            checks.hidden(self, worker)
            roots = tuple(graph.sinks())
            if not roots or rng.random() < 0.4:
                visible = graph.visible()
                roots = tuple(sorted(rng.sample(visible, min(len(visible), rng.randint(1, 3)))))
            roots = tuple(root for root in roots if not forward.reaches_forgotten(self, worker.rank, root))
            if not roots:
                continue  # ``backward`` refuses to start a pass from nothing
            recorded = rng.random() < 0.3
            inputs = self._inputs() if rng.random() < 0.25 else None
            fast = (rng.random() < 0.4) != self.swapped and inputs is None
            if inputs is None:
                used = forward.used_sends(self, worker.rank, roots)
            else:
                used = forward.needed_sends(self, worker.rank, roots, inputs)
            history = PassHistory(PassId(worker.rank, next(worker.numbers)), fast, roots, used, recorded, inputs)
            history.faulty = any(worker.crashed for worker in self.workers) or self.network.has_broken
            self.histories.append(history)
            if len(used) > 2 or rng.random() < 0.3:
                self._plan_faults()
            yield from backward(worker, history)

    def _inputs(self) -> dict[int, frozenset[int]]:
        """Some values on some workers."""
        rng, found = self.rng, {}
        for worker in rng.sample(self.workers, rng.randint(1, len(self.workers))):
            if worker.context is not None and (visible := worker.context.graph.visible()):
                found[worker.rank] = frozenset(rng.sample(visible, min(len(visible), rng.randint(1, 2))))
        return found

    # Faults

    def _plan_faults(self) -> None:
        """Schedule some of the remaining faults during the pass that starts now, close together to do more harm."""
        rng = self.rng
        moment = rng.choice((0.1, 0.3, 1.0)) * rng.random()
        for _ in range(rng.randint(0, len(self._faults))):
            self.clock.after(moment, self._faults.pop(), rng.choice((0, 200)))
            moment += rng.uniform(0.0, 0.1)

    def fault(self, name: str) -> None:
        """Count a fault. All passes that have not finished may fail because of it."""
        self.counts[name] += 1
        for history in self.histories:
            history.faulty |= not history.outcome

    def _crash(self, patience: int = 0) -> None:
        live = self.live()
        if len(live) < 2:
            return
        # The worst moment is when it has just sent something and nobody waits for its answer. Wait for that a while.
        far = {rank for rank, towards in self.next_hops.items() if towards != self.main_rank or not self.is_sparse}
        unnoticed = [w for w in live if w.rank in far and self.network.crash_is_unnoticed(w.rank)]
        chosen = unnoticed if patience else live
        if not chosen:
            self.clock.after(0.004, self._crash, patience - 1)
            return
        worker = self.rng.choice(chosen)
        self.trace("%d crashes", worker.rank)
        worker.crashed = True
        self.fault("crashes")
        self.network.cut_off(worker.rank)
        for other in self.live():
            self.clock.after(0.5 + self.rng.uniform(0.0, 1.0), other.died, worker.rank)

    def clean_up(self, source: int, target: int) -> None:
        """A clean-up reaches its target. Those of a crashed worker may be lost."""
        if not self.workers[target].crashed and (not self.workers[source].crashed or self.rng.random() < 0.5):
            self.workers[target].on_release()

    # Events

    def _run_dry(self) -> None:
        self.quiet_at = self.clock.now + MAX_SECONDS
        self._after_event()
        while self.clock.step():
            self._after_event()
            if self.clock.now > self.quiet_at:
                raise Violation("messages are sent for ever")

    def _after_event(self) -> None:
        self.counts["steps"] += 1
        if self.touched:
            checks.every_step(self)
            self.touched.clear()


def run(seed: int, tracing: bool = False) -> Outcome:
    """Run a seed. Any exception is a failure, too."""
    world = World(seed, tracing)
    try:
        world.run()
        _same_messages(world, seed)
    except Exception as error:
        return Outcome(seed, f"{type(error).__name__}: {error}", world.counts, "passes")
    return Outcome(seed, None, world.counts, "passes")


def _same_messages(world: World, seed: int) -> None:
    """If every send is used, FAST and SMART passes take the same messages. Both are profiled, so neither takes the fast
    path, and the same happens at the same times.
    """
    if not world.faults.clear:
        return
    one, other = [World(seed, tracing=False, swapped=swapped, profiled=True) for swapped in (False, True)]
    one.run()
    if not all(history.is_complete for history in one.histories):
        return
    world.counts["compared with the other mode"] += len(world.histories)
    other.run()
    for history, twin in zip(one.histories, other.histories, strict=True):
        if history.messages != twin.messages:
            raise Violation(f"{history} took {history.messages}, and {twin.messages} as one of the other kind")
