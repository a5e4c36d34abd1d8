"""The network between the workers, and what it does to messages.

Calls and answers use connections: none is duplicated, and one is lost only if its connection breaks. They may overtake
each other, as when many threads handle them. Batches and replies may be lost or duplicated.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farprop.protocol.references.control_plane import Batch, ControlReply
from farprop.protocol.references.records import Fork, ReturnedFork, UserReference
from tests.simulation.ledger import show

if TYPE_CHECKING:
    from tests.simulation.world import World


class Connection:
    """Calls from one worker to another, and their answers."""

    __slots__ = ("broken", "callee", "caller", "heard", "number")

    def __init__(self, caller: int, callee: int, number: int) -> None:
        self.caller = caller
        self.callee = callee
        self.number = number
        self.broken = False
        self.heard: set[int] = set()  # the ends that know that it is broken


class Call:
    """A call. It may make a value, to which the caller has a reference from the start."""

    __slots__ = ("callee", "caller", "certain", "connection", "lent", "number", "open", "reference")

    def __init__(self, number: int, caller: int, callee: int, reference: UserReference | None) -> None:
        self.number = number
        self.caller = caller
        self.callee = callee
        self.reference = reference
        self.connection: Connection | None = None
        self.certain = False  # it arrives even if the connection breaks
        self.open = True
        self.lent: list[UserReference] = []  # references of the caller, which it holds while the call is open

    def __str__(self) -> str:
        return f"#{self.number}"


class Message:
    """A call or an answer on its way."""

    __slots__ = ("call", "connection", "forks", "kind", "not_before", "number", "returned", "source", "target")

    def __init__(
        self,
        kind: str,
        call: Call,
        forks: list[Fork],
        source: int,
        target: int,
        connection: Connection | None,
        returned: Sequence[ReturnedFork] = (),
    ) -> None:
        self.kind = kind
        self.call = call
        self.forks = forks
        self.returned = returned  # borrowed forks that an answer gives back
        self.source = source
        self.target = target
        self.connection = connection  # None for messages of a worker to itself
        self.number = 0
        self.not_before = 0.0

    @property
    def certain(self) -> bool:
        """Whether it arrives even if its connection breaks."""
        return self.kind == "calls" and self.call.certain

    def __str__(self) -> str:
        returns = f", returns {[show(returned.fork) for returned in self.returned]}" if self.returned else ""
        return f"{self.kind[:-1]} {self.call} with {show(self.forks)}{returns}"


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.in_flight: dict[int, Message] = {}
        self.quiet = False  # no faults any more
        self._numbers = itertools.count(1)
        self._connections: list[Connection] = []
        self._cut_off: frozenset[int] = frozenset()  # cut off from the others
        self._cut_off_loses = False

    # Calls and answers

    def connect(self, caller: int, callee: int) -> Connection:
        connection = Connection(caller, callee, next(self._numbers))
        self._connections.append(connection)
        return connection

    def send(self, message: Message) -> None:
        self.world.counts[message.kind] += 1
        self.world.counts["forks"] += len(message.forks)
        self.world.counts["returned"] += len(message.returned)
        self.world.trace("%d -> %d: %s", message.source, message.target, message)
        if message.connection is not None and message.connection.broken and not message.certain:
            self.world.trace("    lost: its connection is broken already")
            return
        message.number = next(self._numbers)
        self.in_flight[message.number] = message
        makes = message.kind == "calls" and message.call.reference is not None
        late = makes and not self.quiet and self.world.rng.random() < self.world.faults.late
        delay = self._delay() + (self.world.rng.uniform(0.1, 3.0) if late else 0.0)
        self.world.clock.after(delay, self._deliver_message, message)

    def _deliver_message(self, message: Message) -> None:
        if message.number not in self.in_flight:
            return
        if self.partitioned(message.source, message.target) or message.not_before > self.world.clock.now:
            self.world.clock.after(0.05 + self._delay(), self._deliver_message, message)
            return
        del self.in_flight[message.number]
        if self._is_heard(message.source, message.target):
            self.world.trace("%d <- %d: %s", message.target, message.source, message)
            self.world.workers[message.target].receive(message)

    def sends_early_forks(self, rank: int) -> bool:
        """Whether a worker passes on a reference that it received and whose value may not be made yet."""
        return any(
            not fork.exists and fork.rref.created_on != rank
            for message in self.in_flight.values()
            if message.source == rank
            for fork in message.forks
        )

    def break_one(self) -> None:
        """Break a connection. Messages on it are lost or still arrive; both ends notice it, at different times."""
        whole = [c for c in self._connections if not c.broken]
        if whole and not self.quiet:
            self._break(self.world.rng.choice(whole))

    def _break(self, connection: Connection) -> None:
        rng = self.world.rng
        connection.broken = True
        self.world.counts["broken connections"] += 1
        self.world.trace("connection %d from %d to %d breaks", connection.number, connection.caller, connection.callee)
        for message in list(self.in_flight.values()):
            if message.connection is connection and not message.certain and rng.random() < 0.6:
                self.world.trace("    %s is lost", message)
                del self.in_flight[message.number]
        for rank in (connection.caller, connection.callee):
            self.world.clock.after(self._delay(), self.world.workers[rank].connection_lost, connection)

    def cut_off(self, crashed: int) -> dict[int, float]:
        """A worker crashed. Some peers see their connection break before they know of the crash; some messages of the
        worker arrive much later. Returns until when each peer still receives messages.
        """
        rng = self.world.rng
        heard_until: dict[int, float] = {}
        held = rng.random() < 0.7
        for message in self.in_flight.values():
            if message.source == crashed and held:
                message.not_before = heard_until[message.target] = self.world.clock.now + rng.uniform(0.5, 2.0)
        for connection in self._connections:
            if not connection.broken and crashed in (connection.caller, connection.callee):
                connection.broken = True
                other = connection.callee if crashed == connection.caller else connection.caller
                if rng.random() < 0.5:
                    self.world.clock.after(self._delay(), self.world.workers[other].connection_lost, connection)
        return heard_until

    # Batches and replies

    def send_control(self, source: int, target: int, content: Batch | ControlReply) -> None:
        rng, faults = self.world.rng, self.world.faults
        self.world.counts["batches" if isinstance(content, Batch) else "replies"] += 1
        if not self.quiet and rng.random() < faults.loss:
            self.world.counts["lost messages"] += 1
            self.world.trace("%d -> %d: %s is lost", source, target, content)
            return
        self.world.trace("%d -> %d: %s", source, target, content)
        self.world.clock.after(self._delay(), self._deliver_control, source, target, content)
        if not self.quiet and rng.random() < faults.duplication:
            self.world.counts["doubled messages"] += 1
            self.world.clock.after(self._delay(), self._deliver_control, source, target, content)

    def _deliver_control(self, source: int, target: int, content: Batch | ControlReply) -> None:
        if self.partitioned(source, target):
            if self._cut_off_loses:
                self.world.counts["lost messages"] += 1
            else:
                self.world.clock.after(0.1 + self._delay(), self._deliver_control, source, target, content)
        elif self._is_heard(source, target):
            self.world.trace("%d <- %d: %s", target, source, content)
            self.world.workers[target].take(source, content)

    def _is_heard(self, source: int, target: int) -> bool:
        """Whether the receiver accepts it. One that believes the sender dead refuses, and the sender notices."""
        receiver = self.world.workers[target]
        if receiver.crashed:
            return False
        if source not in receiver.state.dead:
            return True
        self.world.clock.after(self._delay(), self.world.workers[source].hear_death, target)
        return False

    # Partitions and delays

    def partition(self) -> None:
        """Some workers are cut off from the others for a while. Connections across may break."""
        rng = self.world.rng
        ranks = list(range(len(self.world.workers)))
        self._cut_off = frozenset(rng.sample(ranks, rng.randint(1, len(ranks) - 1)))
        self._cut_off_loses = rng.random() < 0.5
        self.world.counts["partitions"] += 1
        self.world.trace("workers %s are cut off", sorted(self._cut_off))
        for connection in list(self._connections):
            if not connection.broken and self.partitioned(connection.caller, connection.callee) and rng.random() < 0.3:
                self._break(connection)

    def heal(self) -> None:
        if self._cut_off:
            self.world.trace("workers %s are back", sorted(self._cut_off))
        self._cut_off = frozenset()

    def partitioned(self, one: int, other: int) -> bool:
        return (one in self._cut_off) != (other in self._cut_off)

    def _delay(self) -> float:
        rng = self.world.rng
        if not self.quiet and rng.random() < self.world.faults.slow:
            return rng.uniform(0.05, 1.0)
        return rng.uniform(0.001, 0.02)
