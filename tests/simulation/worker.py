"""A worker: the state machine under test, in a small runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING

from farprop.protocol.references.control_plane import Batch, ControlReply
from farprop.protocol.references.records import (
    DROPPABLE,
    USABLE,
    Fork,
    InstructionKind,
    OwnedValue,
    ReturnedFork,
    User,
    UserReference,
)
from farprop.protocol.references.state_machine import RRefStateMachine
from tests.simulation import checks, program
from tests.simulation.ledger import ForkHistory, ValueHistory
from tests.simulation.network import Call, Connection, Message

if TYPE_CHECKING:
    from tests.simulation.world import World

RETRY = 0.2  # seconds until a batch without a reply is sent again
LATER = 0.005
BROKEN = object()  # in the slot of a value that will never be made


class Task:
    """A function that was called, and the references in its arguments."""

    __slots__ = ("arguments", "borrowed", "call", "history")

    def __init__(
        self,
        call: Call,
        arguments: list[UserReference | OwnedValue],
        borrowed: list[UserReference],
        history: ValueHistory | None,
    ) -> None:
        self.call = call
        self.arguments = arguments
        self.borrowed = borrowed  # what came with the call, wherever it is now
        self.history = history  # of the value that it makes

    def any_void(self) -> bool:
        return any(isinstance(a, UserReference) and a.state is User.VOID for a in self.arguments)


class Worker:
    """One worker. ``program`` acts for it."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.state = RRefStateMachine(rank)  # the state machine, for read access
        self.crashed = False
        self.held: list[UserReference | OwnedValue] = []  # what the program can reach, besides arguments
        self.calls: list[Call] = []  # without an answer
        self.tasks: list[Task] = []  # not finished
        self.dropped: set[UserReference] = set()  # borrowed references that the program has dropped
        self.connections: dict[int, Connection] = {}
        self._dropped_while_lent: list[UserReference] = []
        self._sent: dict[int, Batch] = {}  # the batch in flight to each worker, or the last one

    @property
    def machine(self) -> RRefStateMachine:
        """The state machine, for changes: it is checked after this event."""
        self.world.touched.add(self.rank)
        return self.state

    # Passing references

    def passable(self) -> list[UserReference | OwnedValue]:
        """What the program has and can pass on."""
        return [
            thing
            for thing in self.held
            if (thing.state in USABLE if isinstance(thing, UserReference) else not _is_broken(thing))
        ]

    def everything(self) -> list[UserReference | OwnedValue]:
        """What the program can reach."""
        return [*self.held, *(thing for task in self.tasks for thing in task.arguments)]

    def owner_of(self, thing: UserReference | OwnedValue) -> int:
        return thing.owner if isinstance(thing, UserReference) else self.rank

    def fork(self, source: UserReference | OwnedValue, to: int, route: object) -> Fork:
        fork = self.machine.fork(source, to, route)
        ledger = self.world.ledger
        parent = ledger.forks[source.fork] if isinstance(source, UserReference) else None
        ledger.forks[fork.fork] = ForkHistory(ledger.values[source.rref], self.rank, to, parent)
        return fork

    def lend_or_fork(self, source: UserReference | OwnedValue, call: Call) -> Fork:
        """What a request carries: sometimes the reference itself if its owner gets it, else a fork.

        A request may have to fork all of its references, because one of them can't be lent.
        """
        lent = self.machine.lend(source, call.callee) if self.world.rng.random() < 0.3 else None
        if lent is None:
            return self.fork(source, call.callee, call.connection)
        self.world.counts["lent"] += 1
        call.lent.append(source)  # type: ignore[arg-type]
        return lent

    def own(self) -> None:
        value = self.machine.own()
        self.world.ledger.values[value.rref] = ValueHistory(value.rref, self.rank, self.rank, came=True)
        self.held.append(value)

    def drop(self, thing: UserReference | OwnedValue) -> None:
        self.world.trace("%d drops %s", self.rank, thing)
        if isinstance(thing, UserReference):
            if self._is_lent(thing):
                self._dropped_while_lent.append(thing)
            elif thing.state is User.BORROWED and self.world.rng.random() < 0.8:
                self.dropped.add(thing)  # the answer of the call tells it
            else:
                self.machine.drop(thing)

    def _is_lent(self, reference: UserReference) -> bool:
        return any(lent is reference for call in self.calls for lent in call.lent)

    # Calls

    def call(self, callee: int, creates: bool) -> Call:
        """A call that is about to be sent."""
        reference = self.machine.create(callee) if creates else None
        call = Call(self.world.next_number(), self.rank, callee, reference)
        if callee != self.rank:
            if callee not in self.connections:
                self.connections[callee] = self.world.network.connect(self.rank, callee)
            call.connection = self.connections[callee]
        if reference is not None:
            value = ValueHistory(reference.rref, callee, self.rank, came=False)
            self.world.ledger.values[reference.rref] = value
            self.world.ledger.forks[reference.fork] = ForkHistory(value, self.rank, self.rank, None)
        self.calls.append(call)
        return call

    def send(self, call: Call, forks: list[Fork]) -> None:
        self.world.network.send(Message("calls", call, forks, self.rank, call.callee, call.connection))

    def never_send(self, call: Call, forks: list[Fork]) -> None:
        if self.crashed:
            return
        self.world.trace("%d never sends call %s", self.rank, call)
        self._undelivered(forks)
        if call.open:
            self._close(call)
            if call.reference is not None:
                self._recall(call.reference)
                self.machine.unsent(call.reference)

    def interrupt(self, call: Call, forks: list[Fork], sent: bool) -> None:
        """The program is interrupted while it sends a call, and does not know whether it did."""
        self.world.counts["interrupted sends"] += 1
        self.world.trace("%d is interrupted when it sends call %s", self.rank, call)
        if sent:
            self.send(call, forks)
        self._close(call)
        self._note_revoked(forks)
        self.machine.doubted(forks)
        if call.reference is not None:
            self._recall(call.reference)
            self.machine.unanswered(call.reference, lost=True)

    def _undelivered(self, forks: list[Fork]) -> None:
        self.world.counts["unsent messages"] += 1
        self._note_revoked(forks)
        self.machine.undelivered(forks)

    def _note_revoked(self, forks: list[Fork]) -> None:
        for fork in forks:
            if not fork.lent:
                self.world.ledger.forks[fork.fork].revoked = True

    def time_out(self, call: Call) -> None:
        if call.open and not self.crashed:
            self.world.counts["timeouts"] += 1
            self.world.trace("%d: call %s times out", self.rank, call)
            self._close(call)
            if call.reference is not None:
                if not call.certain:
                    self._recall(call.reference)
                self.machine.unanswered(call.reference, lost=not call.certain)

    def _close(self, call: Call) -> None:
        call.open = False
        self.calls.remove(call)
        for reference in call.lent:
            if reference in self._dropped_while_lent and not self._is_lent(reference):
                self._dropped_while_lent.remove(reference)
                self.drop(reference)

    def _recall(self, reference: UserReference) -> None:
        self.world.ledger.values[reference.rref].recalled = True

    def connection_lost(self, connection: Connection) -> None:
        if self.crashed:
            return
        self.world.trace("%d hears that connection %d is broken", self.rank, connection.number)
        connection.heard.add(self.rank)
        if self.connections.get(connection.callee) is connection:
            del self.connections[connection.callee]
        self._lose_route(connection)
        for call in [call for call in self.calls if call.connection is connection]:
            self._close(call)
            if call.reference is not None:
                self._recall(call.reference)
                self.machine.unanswered(call.reference, lost=True)

    def _lose_route(self, connection: Connection) -> None:
        for fork, passed in self.state.passed.items():
            if passed.route is connection:
                self.world.ledger.forks[fork].revoked = True
        self.machine.route_lost(connection)

    def hear_death(self, peer: int) -> None:
        if self.crashed or peer in self.state.dead:
            return
        self.world.trace("%d takes %d for dead", self.rank, peer)
        self.machine.died(peer)
        self.connections.pop(peer, None)
        for call in [call for call in self.calls if call.callee == peer]:
            self._close(call)

    # Messages that arrive

    def receive(self, message: Message) -> None:
        call = message.call
        if message.returned:
            self.machine.returned(message.source, message.returned)
        borrow = message.kind == "calls" and self.world.rng.random() < 0.8
        things = [self._arrive(fork, message.source, call, borrow) for fork in message.forks]
        if message.kind == "calls":
            self._receive_call(call, things)
        elif not call.open:
            # Nobody waits for the answer, but its references have arrived.
            for thing in things:
                self.drop(thing)
        else:
            self._close(call)
            if call.reference is not None:
                self.machine.made(call.reference)
            program.hand_over(self, things)

    def _arrive(self, fork: Fork, sender: int, call: Call, borrow: bool) -> UserReference | OwnedValue:
        thing = self.machine.find_lent(fork, sender) or self.machine.arrive(fork, sender, borrow)
        if isinstance(thing, UserReference) and thing.state is User.VOID:
            if fork.lent:
                checks.void_lent(self, thing, call)
            else:
                checks.void(self, thing)
        return thing

    def _receive_call(self, call: Call, things: list[UserReference | OwnedValue]) -> None:
        rng = self.world.rng
        history = None
        borrowed = [t for t in things if isinstance(t, UserReference) and t.state is User.BORROWED]
        if call.reference is not None:
            history = self.world.ledger.values[call.reference.rref]
            history.came = True
            value = self.machine.make(call.caller, call.reference.rref, call.reference.fork)
            if value is None:
                self.world.trace("%d does not run call %s", self.rank, call)
                history.refused = True
                for thing in things:
                    self.drop(thing)
                self._end_borrowing(borrowed)
                return
            checks.made(self, value)
            if rng.random() < 0.2:
                self.held.append(value)
        if rng.random() < 0.6:
            # The function stores them, and the program may use them before the call has ended.
            program.hand_over(self, things)
            things = []
        task = Task(call, things, borrowed, history)
        self.tasks.append(task)
        self.world.clock.after(rng.choice((rng.uniform(0.0, 0.1), rng.uniform(0.1, 1.0))), self._finish, task)
        if rng.random() < 0.5:
            self.world.clock.after(rng.uniform(0.0, 0.5), self._end_borrowing, borrowed)  # calls may take long

    def _finish(self, task: Task) -> None:
        """The function returns."""
        if self.crashed:
            return
        if not task.any_void() and task.history is not None:
            checks.runs(task.history)
        self.tasks.remove(task)
        for thing in task.arguments:
            if self.world.rng.random() < 0.5:
                self.held.append(thing)
            else:
                self.drop(thing)
        self._answer(task.call, task.borrowed)

    def _answer(self, call: Call, borrowed: list[UserReference]) -> None:
        rng = self.world.rng
        to = call.caller
        if to in self.state.dead:
            self._end_borrowing(borrowed)
            return
        things = self.passable()
        chosen = rng.sample(things, min(len(things), rng.choice((0, 0, 0, 1))))
        forks = [self.fork(thing, to, call.connection) for thing in chosen]
        returned = [back for back in map(self._give_back, borrowed) if back is not None]
        self._end_borrowing(borrowed)
        if rng.random() < self.world.faults.unsent:
            # The answer is too large, and a failure is sent in its place.
            self._undelivered(forks)
            self.machine.not_returned(to, returned)
            forks, returned = [], []
        if call.connection is None or self.rank not in call.connection.heard:
            self.world.network.send(Message("answers", call, forks, self.rank, to, call.connection, returned))
        else:
            self.machine.not_returned(to, returned)
            if rng.random() < 0.5:
                self._undelivered(forks)
            else:
                # A runtime that does not know whether an answer was sent reports that it may be lost.
                self._lose_route(call.connection)

    def _give_back(self, reference: UserReference) -> ReturnedFork | None:
        """What an answer says of a borrowed reference that the program has dropped."""
        returned = self.machine.give_back(reference) if reference in self.dropped else None
        if returned is not None:
            self.dropped.remove(reference)
        return returned

    def _end_borrowing(self, borrowed: list[UserReference]) -> None:
        """A call that brought these references has ended, or takes long: those that the program has are kept."""
        if self.crashed:
            return
        for reference in borrowed:
            if reference in self.dropped:
                self.dropped.remove(reference)
                if reference.state in DROPPABLE:
                    self.machine.drop(reference)
            elif reference.state is User.BORROWED:
                self.machine.keep(reference)

    def take(self, peer: int, content: Batch | ControlReply) -> None:
        if isinstance(content, ControlReply):
            self.machine.replied(peer, content)
        else:
            reply = self.machine.incoming(peer, content)
            checks.replied(self, content, reply)
            self.world.network.send_control(self.rank, peer, reply)

    # Instructions of the machine

    def settle(self) -> None:
        """Carry out the machine's instructions."""
        machine = self.state
        while machine.instructions:
            instructions = machine.instructions.copy()
            machine.instructions.clear()
            for kind, subject in instructions:
                if kind is InstructionKind.SEND:
                    self._send_batch(subject)
                elif kind is InstructionKind.SEND_LATER:
                    self.world.clock.after(LATER, self._send_batch, subject)
                elif kind is InstructionKind.VOID:
                    checks.void(self, subject)
                elif kind is InstructionKind.BROKEN:
                    subject.slot = BROKEN
                    checks.broken(self, subject)

    def _send_batch(self, peer: int) -> None:
        batch = None if self.crashed else self.state.outgoing(peer)
        if batch is not None and self._sent.get(peer) is not batch:
            self._sent[peer] = batch
            for operation in batch.operations:
                self.world.counts[operation.kind.name] += 1
            self._send_until_replied(peer, batch)

    def _send_until_replied(self, peer: int, batch: Batch) -> None:
        if not self.crashed and self.state.outgoing(peer) is batch:
            self.world.network.send_control(self.rank, peer, batch)
            self.world.clock.after(RETRY, self._send_until_replied, peer, batch)


def _is_broken(value: OwnedValue) -> bool:
    return getattr(value, "slot", None) is BROKEN
