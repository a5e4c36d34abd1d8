"""What the programs of the workers do: any of the things that programs do with references, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farprop.protocol.references.records import OwnedValue, UserReference

if TYPE_CHECKING:
    from tests.simulation.calls import Call
    from tests.simulation.worker import Worker
    from tests.simulation.world import World

_ACTIONS = {"remote": 5, "call": 5, "own": 2, "drop": 7, "pass home": 2, "pass to self": 1}


def step(world: World) -> None:
    """One worker does one thing."""
    chance = world.chance
    worker = chance.choice(world.live())
    (action,) = chance.choices(list(_ACTIONS), list(_ACTIONS.values()))
    if action == "own":
        worker.own()
    elif action == "drop":
        if worker.held:
            worker.drop(worker.held.pop(chance.randrange(len(worker.held))))
    elif action == "pass to self":
        _call(worker, worker.rank, creates=False)
    elif action == "pass home":
        _pass_home(worker)
    else:
        _call(worker, chance.choice([w.rank for w in world.workers if w is not worker]), action == "remote")


def got(worker: Worker, things: list[UserReference | OwnedValue]) -> None:
    """A program has references that are new to it. In haste it passes them on before the owner can count them."""
    worker.held += things
    chance = worker.world.chance
    for thing in things:
        if chance.random() < worker.world.weather.haste:
            worker.world.clock.after(chance.uniform(0.0, 0.02), _hand_on, worker, thing)


def _hand_on(worker: Worker, thing: UserReference | OwnedValue) -> None:
    """Pass a reference on, often to its owner, and often drop it."""
    chance = worker.world.chance
    if worker.crashed or not any(thing is other for other in worker.passable()):
        return
    to = chance.choice((worker.owner_of(thing), chance.randrange(len(worker.world.workers))))
    _send(worker, worker.call(to, creates=False), [thing])
    if chance.random() < 0.8:
        worker.drop(thing)
        worker.held = [other for other in worker.held if other is not thing]


def _pass_home(worker: Worker) -> None:
    """Pass a reference to the owner of its value."""
    chance = worker.world.chance
    things = [thing for thing in worker.passable() if worker.owner_of(thing) != worker.rank]
    if things:
        thing = chance.choice(things)
        _send(worker, worker.call(worker.owner_of(thing), creates=False), [thing])


def _call(worker: Worker, callee: int, creates: bool) -> None:
    chance = worker.world.chance
    things = worker.passable()
    passing = chance.sample(things, min(len(things), chance.choice((0, 1, 1, 2))))
    call = worker.call(callee, creates)
    _send(worker, call, passing)
    if call.reference is not None:
        got(worker, [call.reference])


def _send(worker: Worker, call: Call, passing: list[UserReference | OwnedValue]) -> None:
    """Send a call, or don't, and give up on its answer some time, or wait for it."""
    chance, weather, clock = worker.world.chance, worker.world.weather, worker.world.clock
    forks = [worker.fork(thing, call.callee, call.connection) for thing in passing]
    if call.callee in worker.state.dead:
        worker.never_send(call, forks)
    elif chance.random() < weather.unsent / 2:
        worker.interrupt(call, forks, sent=chance.random() < 0.5)
    elif chance.random() < weather.unsent:
        clock.after(chance.choice((0.0, chance.uniform(0.0, 0.3))), worker.never_send, call, forks)
    else:
        if chance.random() < weather.timeouts:
            call.certain = chance.random() < 0.5
            clock.after(chance.uniform(0.005, 0.3), worker.time_out, call)
        worker.send(call, forks)
