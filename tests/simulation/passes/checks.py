"""What must hold after every event, at certain events, and at rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farprop.protocol.backward import ROOTS, Run, Send, Stuck, Survey
from tests.simulation.harness import Violation

if TYPE_CHECKING:
    from tests.simulation.passes.history import PassHistory
    from tests.simulation.passes.local_pass import LocalPass
    from tests.simulation.passes.worker import Worker
    from tests.simulation.passes.world import World

# After every event


def every_step(world: World) -> None:
    for local in world.touched:
        local.machine.validate()
        if local.history.began and not local.history.faulty and (total := local.history.credit()) != 1:
            raise Violation(f"the credit of {local.history} is {total}")


# When something happens


def hidden(world: World, worker: Worker) -> None:
    """A program looks for values to start a pass from."""
    for history in world.histories:
        local = history.locals.get(worker.rank)
        if history.outcome != "ended" and local is not None and not local.graph.hidden.issuperset(local.values):
            raise Violation(f"a program has gradients of {history}, which has not ended")


def reached(local: LocalPass) -> None:
    """A pass reached a worker for the first time."""
    history = local.history
    if history.outcome and not local.world.workers[local.world.maker].crashed:
        raise Violation(f"{history} has {history.outcome}, and then comes to worker {local.rank}")


def begins(local: LocalPass, run: Run) -> None:
    """A worker runs a part of its graph."""
    history, rank = local.history, local.rank
    if local.machine.failed:
        raise Violation(f"{history} has failed on worker {rank}, and runs there")
    if history.running[rank] and any(len(unit.sources) > 1 for unit in local.machine.units):
        raise Violation(f"{history} runs two things at once on worker {rank}")
    used = history.used.get(rank, set())
    fed = history.fed.setdefault(rank, set())
    started = history.started.setdefault(rank, set())
    if run.source is not None:
        if run.source not in used or run.source in fed:
            raise Violation(f"{history} feeds source {run.source} of worker {rank}, which is not its turn")
        fed.add(run.source)
    for number in run.units:
        sources = local.machine.units[number].sources
        who = f"unit {number} of worker {rank} in {history}"
        if number in started:
            raise Violation(f"{who} runs again")
        if sources.isdisjoint(used):
            raise Violation(f"{who} runs, and nothing leads to it")
        if not (sources & used) <= fed:
            raise Violation(f"{who} runs before all that leads to it")
        started.add(number)


def sends(local: LocalPass, send: Send) -> None:
    """Gradients leave for another worker, or for this one."""
    history = local.history
    if local.machine.failed:
        raise Violation(f"{history} has failed on worker {local.rank}, which sends gradients for {send.target}")
    if send.target in history.sent:
        raise Violation(f"{history} sends gradients for {send.target} again")
    history.sent.add(send.target)
    ran = history.ran.get(local.rank, set())
    if not any(send.target in unit.targets for number, unit in enumerate(local.machine.units) if number in ran):
        raise Violation(f"{history} sends gradients for {send.target} that are not computed")


def ended(world: World, history: PassHistory) -> None:
    """The origin believes the pass complete: it must be."""
    for rank, used in history.used.items():
        local = history.locals.get(rank)
        if local is None:
            raise Violation(f"{history} ended, and has not come to worker {rank}")
        ran = history.ran.get(rank, set())
        if missed := used - history.fed.get(rank, set()):
            raise Violation(f"{history} ended, and sources {sorted(missed)} of worker {rank} got no gradients")
        left = [n for n, unit in enumerate(local.machine.units) if n not in ran and not used.isdisjoint(unit.sources)]
        if left:
            raise Violation(f"{history} ended before units {left} of worker {rank} ran")
    for rank, local in history.locals.items():
        for target in local.graph.targets(local.values):
            sender = world.workers[target.worker].context
            if sender is not None and target.message_id not in sender.graph.sends:
                raise Violation(f"{history} ended, and worker {rank} has gradients of {target}, which was not recorded")
        if missing := history.fed.get(rank, set()) - {ROOTS} - local.arrived.keys() if history.recorded else ():
            raise Violation(f"{history} ended, and worker {rank} did not record gradients of {sorted(missing)}")
    if history.inputs is not None and (idle := history.locals.keys() - history.used.keys() - {history.id.origin}):
        raise Violation(f"{history} came to workers {sorted(idle)}, which lead to none of its inputs")
    if history.fast and not history.is_complete:
        raise Violation(f"{history} is a fast one and ended, though a send of a worker in it is not used")


def not_needed(history: PassHistory) -> None:
    """The origin believes that no root depends on any input."""
    if needed := {rank: sorted(sources) for rank, sources in history.used.items() if sources}:
        raise Violation(f"{history} ended at once, and its inputs depend on {needed}")


def at_rest_but_blocked(history: PassHistory, action: Survey | Stuck) -> None:
    """The origin found that the pass is at rest and a worker is blocked."""
    if history.inputs is not None:
        raise Violation(f"a worker is blocked in {history}, which was told beforehand what arrives")
    if history.running.total():
        raise Violation(f"{history} is said to be at rest, and runs on workers {sorted(+history.running)}")
    for local in history.locals.values():
        machine = local.machine
        if history.fast and not machine.sources <= history.fed.get(local.rank, set()):
            break
        fed, started = history.fed.get(local.rank, set()), history.started.get(local.rank, set())
        if any(n not in started and not fed.isdisjoint(unit.sources) for n, unit in enumerate(machine.units)):
            break
    else:
        raise Violation(f"nobody is blocked in {history}, but its origin wants {action}")
    if history.fast != isinstance(action, Stuck):
        raise Violation(f"{action} is not for {history}")
    history.stuck |= history.fast


def raised(world: World, history: PassHistory) -> None:
    """``backward`` raises: all live workers must have dropped the pass, unless the context ended with its maker."""
    for rank, local in sorted(history.locals.items()):
        worker = world.workers[rank]
        # A failure may have reached the origin after the last credit, before its thread saw that credit.
        dropped = local.undone and (local.machine.failed or local.machine.ended)
        if not dropped and not worker.crashed and worker.context is not None and not world.workers[world.maker].crashed:
            raise Violation(f"{history} has failed, and worker {rank} does not know")
        if local.undone and (left := local.graph.sends.keys() & set(local.recorded_sends)):
            raise Violation(f"{history} has failed, and worker {rank} still has its messages {sorted(left)}")


# At rest


def at_rest(world: World) -> None:
    """No messages are on their way: every pass has an outcome, and the right one."""
    for history in world.histories:
        origin = world.workers[history.id.origin]
        if not history.outcome and not origin.crashed:
            raise Violation(f"{history} has neither ended nor failed")
        if history.outcome == "late" and not (history.stuck or history.hurried):
            raise Violation(f"{history} waited for its deadline, though nothing could come")
        if history.outcome == "failed" and world.faults.clear:
            raise Violation(f"{history} has failed, and there was no fault")
        if not history.faulty:
            should_end = history.is_complete or not history.fast
            if (history.outcome == "ended") != should_end:
                raise Violation(f"{history} has {history.outcome}, and all sends are used: {history.is_complete}")
        if history.outcome == "ended":
            for rank, local in history.locals.items():
                if local.undone and not world.workers[rank].crashed:
                    raise Violation(f"{history} ended, but worker {rank} has undone it")


def cleaned_up(world: World) -> None:
    for worker in world.live():
        if worker.context is not None:
            raise Violation(f"in the end, worker {worker.rank} still has the context")
