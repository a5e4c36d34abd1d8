"""The programs of the workers: everything that programs do with references, in random order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farprop.protocol.references.records import OwnedValue, UserReference

if TYPE_CHECKING:
    from tests.simulation.network import Call
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

_ACTIONS = {"remote": 5, "call": 5, "own": 2, "drop": 7, "pass to owner": 2, "pass to self": 1}


def step(world: World) -> None:
    """One worker does one thing."""
    rng = world.rng
    worker = rng.choice(world.live())
    (action,) = rng.choices(list(_ACTIONS), list(_ACTIONS.values()))
    if action == "own":
        worker.own()
    elif action == "drop":
        if worker.held:
            worker.drop(worker.held.pop(rng.randrange(len(worker.held))))
    elif action == "pass to self":
        _call(worker, worker.rank, creates=False)
    elif action == "pass to owner":
        _pass_to_owner(worker)
    else:
        _call(worker, rng.choice([w.rank for w in world.workers if w is not worker]), action == "remote")


def hand_over(worker: Worker, things: list[UserReference | OwnedValue]) -> None:
    """A program gets new references. A hasty one passes them on before the owner can list them."""
    worker.held += things
    rng = worker.world.rng
    for thing in things:
        if rng.random() < worker.world.faults.haste:
            worker.world.clock.after(rng.uniform(0.0, 0.02), _pass_on, worker, thing)


def _pass_on(worker: Worker, thing: UserReference | OwnedValue) -> None:
    """Pass a reference on, often to its owner, and often drop it."""
    rng = worker.world.rng
    if worker.crashed or not any(thing is other for other in worker.passable()):
        return
    to = rng.choice((worker.owner_of(thing), rng.randrange(len(worker.world.workers))))
    _send(worker, worker.call(to, creates=False), [thing])
    if rng.random() < 0.8:
        worker.drop(thing)
        worker.held = [other for other in worker.held if other is not thing]


def _pass_to_owner(worker: Worker) -> None:
    """Pass a reference to the owner of its value."""
    rng = worker.world.rng
    things = [thing for thing in worker.passable() if worker.owner_of(thing) != worker.rank]
    if things:
        thing = rng.choice(things)
        _send(worker, worker.call(worker.owner_of(thing), creates=False), [thing])


def _call(worker: Worker, callee: int, creates: bool) -> None:
    rng = worker.world.rng
    things = worker.passable()
    passing = rng.sample(things, min(len(things), rng.choice((0, 1, 1, 2))))
    call = worker.call(callee, creates)
    _send(worker, call, passing)
    if call.reference is not None:
        hand_over(worker, [call.reference])


def _send(worker: Worker, call: Call, passing: list[UserReference | OwnedValue]) -> None:
    """Send a call, or fail to; then wait for its answer, or give up after some time."""
    rng, faults, clock = worker.world.rng, worker.world.faults, worker.world.clock
    forks = [worker.lend_or_fork(thing, call) for thing in passing]
    if call.callee in worker.state.dead:
        worker.never_send(call, forks)
    elif rng.random() < faults.unsent / 2:
        worker.interrupt(call, forks, sent=rng.random() < 0.5)
    elif rng.random() < faults.unsent:
        clock.after(rng.choice((0.0, rng.uniform(0.0, 0.3))), worker.never_send, call, forks)
    else:
        if rng.random() < faults.timeouts:
            call.certain = rng.random() < 0.5
            clock.after(rng.uniform(0.005, 0.3), worker.time_out, call)
        worker.send(call, forks)
