"""Calls between workers: never duplicated, lost only if the connection breaks, and in any order."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from tests.simulation.passes.threads import Future, PassError

if TYPE_CHECKING:
    from tests.simulation.passes.world import World


SLOWEST = 0.5  # seconds that a message, or a run, takes at most

_NAMES = {
    "propagate": "gradients",
    "give_back": "give-backs",
    "survey": "surveys",
    "reach": "questions of reach",
    "prepare": "preparations",
    "release_sources": "releases",
    "failed": "failures",
    "abort": "aborts",
    "exists": "questions",
}


class Lost(PassError):
    """There will be no answer."""


class Connection:
    """Calls from one worker to another, and their answers."""

    __slots__ = ("broken", "callee", "caller")

    def __init__(self, caller: int, callee: int) -> None:
        self.caller = caller
        self.callee = callee
        self.broken = False


class Call:
    __slots__ = ("answer", "arguments", "callee", "caller", "connection", "method", "number")

    def __init__(self, number: int, connection: Connection, method: str, arguments: tuple[Any, ...]) -> None:
        self.number = number
        self.connection = connection
        self.caller = connection.caller
        self.callee = connection.callee
        self.method = method
        self.arguments = arguments
        self.answer = Future()


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.connections: dict[tuple[int, int], Connection] = {}  # those that the caller believes intact
        self._numbers = itertools.count(1)
        self._open: dict[int, Call] = {}
        self._in_flight: dict[int, tuple[Connection, str]] = {}  # messages in flight, with their kind

    def call(self, caller: int, callee: int, method: str, *arguments: Any) -> Future:
        connection = self.connections.get((caller, callee))
        if connection is None:
            connection = self.connections[caller, callee] = Connection(caller, callee)
        call = Call(next(self._numbers), connection, method, arguments)
        self.world.counts[_NAMES[method]] += 1
        self.world.trace("%d -> %d: call %d, %s%s", caller, callee, call.number, method, arguments)
        self._open[call.number] = call
        if callee in self.world.workers[caller].dead or self.world.workers[callee].crashed:
            self.world.clock.after(self.delay(), self._close, call, None, Lost("nobody is there"))
        else:
            self._send(connection, method, self._arrive, call)
        return call.answer

    def _send(self, connection: Connection, what: str, deliver: Any, *arguments: Any) -> None:
        if not connection.broken:
            number = next(self._numbers)
            self._in_flight[number] = (connection, what)
            self.world.clock.after(self.delay(), self._deliver, number, deliver, *arguments)

    def _deliver(self, number: int, deliver: Any, *arguments: Any) -> None:
        if self._in_flight.pop(number, None) is not None:
            deliver(*arguments)

    def _arrive(self, call: Call) -> None:
        callee = self.world.workers[call.callee]
        if not callee.crashed and call.caller not in callee.dead:
            self.world.trace("%d <- %d: call %d", call.callee, call.caller, call.number)
            callee.serve(call).then(lambda value, error: self._answer(call, value, error))

    def _answer(self, call: Call, value: Any, error: PassError | None) -> None:
        self.world.counts["answers"] += 1
        self.world.trace("%d -> %d: answer %d, %s", call.callee, call.caller, call.number, error or value)
        self._send(call.connection, "answer", self._close, call, value, error)

    def _close(self, call: Call, value: Any, error: PassError | None) -> None:
        caller = self.world.workers[call.caller]
        if self._open.pop(call.number, None) is not None and not caller.crashed:
            self.world.trace("%d <- %d: answer %d", call.caller, call.callee, call.number)
            call.answer.done(value, error)

    # Faults

    def crash_is_unnoticed(self, rank: int) -> bool:
        """Whether this worker has sent credit that is still in flight, and no caller waits for an answer of it."""
        sent = {what for connection, what in self._in_flight.values() if connection.caller == rank}
        return not sent.isdisjoint(("propagate", "give_back")) and all(c.callee != rank for c in self._open.values())

    def break_one(self, patience: int = 0) -> None:
        """Break a connection. The worst moment is while it reports a failure: wait for that for a while."""
        whole = [connection for connection in self.connections.values() if not connection.broken]
        news = {call.connection for call in self._open.values() if call.method in ("failed", "abort")}
        if chosen := [c for c in whole if c in news] if patience else whole:
            self.world.fault("broken connections")
            self._break(self.world.rng.choice(chosen))
        elif patience:
            self.world.clock.after(0.004, self.break_one, patience - 1)

    @property
    def has_broken(self) -> bool:
        """Whether a worker does not know yet that its connection is lost."""
        return any(connection.broken for connection in self.connections.values())

    def cut_off(self, crashed: int) -> None:
        for connection in list(self.connections.values()):
            if not connection.broken and crashed in (connection.caller, connection.callee):
                self._break(connection)

    def _break(self, connection: Connection) -> None:
        """Messages on it are lost or still arrive. The caller notices later."""
        rng = self.world.rng
        self.world.trace("the connection from %d to %d breaks", connection.caller, connection.callee)
        connection.broken = True
        for number, (other, _) in list(self._in_flight.items()):
            if other is connection and rng.random() < 0.6:
                del self._in_flight[number]
        self.world.clock.after(self.delay(), self._lost, connection)

    def _lost(self, connection: Connection) -> None:
        caller = self.world.workers[connection.caller]
        if caller.crashed:
            return
        self.world.trace("%d hears that its connection to %d is lost", connection.caller, connection.callee)
        if self.connections.get((connection.caller, connection.callee)) is connection:
            del self.connections[connection.caller, connection.callee]
        for call in [call for call in self._open.values() if call.connection is connection]:
            self._close(call, None, Lost("the connection is lost"))
        caller.lost(connection.callee)

    def delay(self) -> float:
        rng = self.world.rng
        return rng.uniform(0.05, SLOWEST) if rng.random() < self.world.faults.slow else rng.uniform(0.001, 0.02)
