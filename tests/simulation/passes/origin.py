"""The thread that calls ``backward``: it waits for its pass, makes the survey, and aborts a failed pass everywhere."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from farprop.protocol.backward import ALL, NONE, ROOTS, CreditShare, Ended, PassAction, PassId, Survey
from farprop.protocol.needed_sends import NeededSends, pack_needed, unpack_reached
from tests.simulation.passes import checks
from tests.simulation.passes.history import PassHistory
from tests.simulation.passes.local_pass import LocalPass
from tests.simulation.passes.network import SLOWEST
from tests.simulation.passes.threads import Future, PassError, Steps

if TYPE_CHECKING:
    from tests.simulation.passes.worker import Worker
    from tests.simulation.passes.world import World

# A pass through a tower of recorded ones takes thousands of messages, at worst one after the other. Each of them comes
# with a run, an answer, questions, and pauses in which other threads run.
_SECONDS_A_MESSAGE = 20 * SLOWEST
_LEAST_SECONDS = 100.0


class Origin:
    """The events that the thread waits for."""

    def __init__(self) -> None:
        self.events: deque[PassAction] = deque()
        self.error: PassError | None = None
        self.late = False
        self.waker = Future()

    def tell(self, action: PassAction) -> None:
        self.events.append(action)
        self.waker.done()

    def fail(self, error: PassError) -> None:
        if self.error is None:
            self.error = error
        self.waker.done()

    def expire(self, history: PassHistory) -> None:
        if self.error is None and not history.outcome:
            self.late = True
            history.faulty |= not history.stuck
            self.fail(PassError("the deadline is over"))


def time_for(world: World, history: PassHistory) -> float:
    """The seconds until the deadline of a pass that starts now. Those that are not hurried are late only if stuck."""
    if world.rng.random() < world.faults.hurried:
        history.hurried = True
        return world.rng.choice((0.05, 0.3, 2.0)) * world.rng.random()
    messages = sum(len(worker.context.graph.sends) for worker in world.workers if worker.context is not None)
    return _LEAST_SECONDS + _SECONDS_A_MESSAGE * messages


def backward(worker: Worker, history: PassHistory) -> Steps:
    context = worker.context
    assert context is not None
    origin = Origin()
    worker.origins[history.id] = origin
    local = context.passes[history.id] = LocalPass(worker.world, history, worker.rank, context.graph)
    seconds = time_for(worker.world, history)
    worker.world.quiet_at += seconds
    worker.world.clock.after(seconds, origin.expire, history)
    worker.world.trace("%d: backward from %s, %s", worker.rank, list(history.roots), history)
    try:
        if history.inputs is None or (yield from find_needed(worker, local)):
            yield from worker.on_gradient(local, ROOTS, ALL, waits=True)
            yield from _wait(worker, local, origin)
        elif origin.error is not None:
            raise origin.error
        else:
            checks.not_needed(history)
        history.outcome = "ended"
        for part in history.locals.values():
            part.show()
    except PassError:
        worker.undo(local)
        yield from abort_everywhere(worker, local)
        history.outcome = "late" if origin.late else "failed"
        history.faulty |= not origin.late
        if origin.late and not history.stuck:
            worker.world.counts["early deadlines"] += 1
        checks.raised(worker.world, history)
    del worker.origins[history.id]
    context.passes.pop(history.id, None)
    worker.world.trace("%s has %s", history, history.outcome)


def _wait(worker: Worker, local: LocalPass, origin: Origin) -> Steps:
    while True:
        if origin.error is not None:
            raise origin.error
        if not origin.events:
            origin.waker = Future()
            yield origin.waker
            yield worker.world.network.delay()
            continue
        action = origin.events.popleft()
        if isinstance(action, Ended):
            return
        if isinstance(action, Survey):
            used = yield from survey(worker, local)
            yield from worker.perform(local, local.on_surveyed(used), waits=True)


def survey(worker: Worker, local: LocalPass) -> Steps:
    """All sends that the roots reach, by worker."""
    found: dict[int, set[int]] = {}
    news = sorted(local.machine.reach([ROOTS]))
    while news:
        asked: dict[int, list[int]] = {}
        for rank, message_id in news:
            if message_id not in found.setdefault(rank, set()):
                found[rank].add(message_id)
                asked.setdefault(rank, []).append(message_id)
        news = []
        for rank, message_ids in asked.items():
            if rank == worker.rank:
                news += sorted(local.machine.reach(message_ids))
            else:
                head = worker.head(local, 0, CreditShare(NONE, {}))
                news += yield worker.call(local, rank, "survey", head, tuple(message_ids))
    return {rank: frozenset(message_ids) for rank, message_ids in found.items()}


def find_needed(worker: Worker, local: LocalPass) -> Steps:
    """Prepare all workers that lead to inputs; returns whether there are any."""
    (roots,) = local.reached_by([ROOTS])
    sends = NeededSends(worker.rank, roots)
    head = worker.head(local, 0, CreditShare(NONE, {}))
    while questions := sends.questions():
        for rank, message_ids in questions.items():
            if rank == worker.rank:
                answers = dict(zip(message_ids, local.reached_by(message_ids), strict=True))
            else:
                local.partners.add(rank)
                numbers = yield worker.call(local, rank, "reach", worker.rank, head, tuple(message_ids))
                answers = unpack_reached(message_ids, numbers)
            sends.on_answer(rank, answers)
    needed = sends.needed()
    for rank, part in needed.items():
        if rank != worker.rank:
            yield worker.call(local, rank, "prepare", head, tuple(pack_needed(part)))
    if needed:
        local.prepare(needed[worker.rank])
    return bool(needed)


def abort_everywhere(worker: Worker, local: LocalPass) -> Steps:
    """All workers that may have the pass drop it: those that such workers know, or all workers if one is dead."""
    world = worker.world
    asked = {worker.rank}
    context = worker.context
    waiting = set(local.partners) | (context.known if context is not None else set())
    while todo := sorted(waiting - asked):
        rank = todo[0]
        asked.add(rank)
        answer = yield from abort(worker, local.id, rank)
        waiting.update(answer if answer is not None else range(len(world.workers)))


def abort(worker: Worker, pass_id: PassId, rank: int) -> Steps:
    """The workers that it knows; None if it is dead."""
    while rank not in worker.dead:
        try:
            return (yield worker.world.network.call(worker.rank, rank, "abort", pass_id))
        except PassError:
            yield 0.3
    return None
