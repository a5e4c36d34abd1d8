"""What must be true after every event, when something happens, and when everything has come to rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farprop.protocol.passes import Run, Send, Stuck, Survey
from tests.simulation.ledger import Violation

if TYPE_CHECKING:
    from tests.simulation.passes.local import Local
    from tests.simulation.passes.stories import PassStory
    from tests.simulation.passes.world import World

# After every event


def every_step(world: World) -> None:
    for local in world.touched:
        local.machine.validate()
        if not local.story.faulty and (total := local.story.credit()) != 1:
            raise Violation(f"the credit of {local.story} is {total}")


# When something happens


def met(local: Local) -> None:
    """A pass came to a worker for the first time."""
    story = local.story
    if story.outcome and not local.world.workers[local.world.maker].crashed:
        raise Violation(f"{story} has {story.outcome}, and then comes to worker {local.rank}")


def begins(local: Local, run: Run) -> None:
    """A worker runs a part of its graph."""
    story, rank = local.story, local.rank
    if local.machine.failed:
        raise Violation(f"{story} has failed on worker {rank}, and runs there")
    if story.running[rank] and any(len(unit.sources) > 1 for unit in local.machine.units):
        raise Violation(f"{story} runs two things at once on worker {rank}")
    used = story.used.get(rank, set())
    fed = story.fed.setdefault(rank, set())
    started = story.started.setdefault(rank, set())
    if run.source is not None:
        if run.source not in used or run.source in fed:
            raise Violation(f"{story} feeds source {run.source} of worker {rank}, which is not its turn")
        fed.add(run.source)
    for number in run.units:
        sources = local.machine.units[number].sources
        who = f"unit {number} of worker {rank} in {story}"
        if number in started:
            raise Violation(f"{who} runs again")
        if sources.isdisjoint(used):
            raise Violation(f"{who} runs, and nothing leads to it")
        if not (sources & used) <= fed:
            raise Violation(f"{who} runs before all that leads to it")
        started.add(number)


def sends(local: Local, send: Send) -> None:
    """Gradients leave for another worker, or for this one."""
    story = local.story
    if local.machine.failed:
        raise Violation(f"{story} has failed on worker {local.rank}, which sends gradients for {send.target}")
    if send.target in story.sent:
        raise Violation(f"{story} sends gradients for {send.target} again")
    story.sent.add(send.target)
    ran = story.ran.get(local.rank, set())
    if not any(send.target in unit.targets for number, unit in enumerate(local.machine.units) if number in ran):
        raise Violation(f"{story} sends gradients for {send.target} that are not computed")


def ended(world: World, story: PassStory) -> None:
    """The origin takes the pass for complete: it must be."""
    for rank, used in story.used.items():
        local = story.locals.get(rank)
        if local is None:
            raise Violation(f"{story} ended, and has not come to worker {rank}")
        ran = story.ran.get(rank, set())
        left = [n for n, unit in enumerate(local.machine.units) if n not in ran and not used.isdisjoint(unit.sources)]
        if left:
            raise Violation(f"{story} ended before units {left} of worker {rank} ran")
    if story.fast and not story.is_complete:
        raise Violation(f"{story} is a fast one and ended, though a send of a worker in it is not used")


def rests(story: PassStory, action: Survey | Stuck) -> None:
    """The origin found that the pass is at rest and somebody blocked."""
    if story.running.total():
        raise Violation(f"{story} is said to be at rest, and runs on workers {sorted(+story.running)}")
    for local in story.locals.values():
        machine = local.machine
        if story.fast and not machine.sources <= story.fed.get(local.rank, set()):
            break
        fed, started = story.fed.get(local.rank, set()), story.started.get(local.rank, set())
        if any(n not in started and not fed.isdisjoint(unit.sources) for n, unit in enumerate(machine.units)):
            break
    else:
        raise Violation(f"nobody is blocked in {story}, but its origin wants {action}")
    if story.fast != isinstance(action, Stuck):
        raise Violation(f"{action} is not for {story}")
    story.stuck |= story.fast


def raised(world: World, story: PassStory) -> None:
    """``backward`` raises: whoever lives has dropped the pass, unless the context has ended with its maker."""
    for rank, local in sorted(story.locals.items()):
        worker = world.workers[rank]
        # The origin may have heard of a failure after the last credit, and before it looked.
        dropped = local.undone and (local.machine.failed or local.machine.ended)
        if not dropped and not worker.crashed and worker.context is not None and not world.workers[world.maker].crashed:
            raise Violation(f"{story} has failed, and worker {rank} does not know")


# At rest


def calm(world: World) -> None:
    """No messages are on their way: every pass has an outcome, and the right one."""
    for story in world.stories:
        origin = world.workers[story.id.origin]
        if not story.outcome and not origin.crashed:
            raise Violation(f"{story} has neither ended nor failed")
        if story.outcome == "late" and not story.stuck:
            raise Violation(f"{story} waited for its deadline, though nothing could come")
        if not story.faulty:
            should_end = story.is_complete or not story.fast
            if (story.outcome == "ended") != should_end:
                raise Violation(f"{story} has {story.outcome}, and all sends are used: {story.is_complete}")
        if story.outcome == "ended":
            for rank, local in story.locals.items():
                if local.undone and not world.workers[rank].crashed:
                    raise Violation(f"{story} ended, but worker {rank} has undone it")


def cleaned_up(world: World) -> None:
    for worker in world.live():
        if worker.context is not None:
            raise Violation(f"in the end, worker {worker.rank} still has the context")
