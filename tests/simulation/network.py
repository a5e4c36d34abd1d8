"""The network between the workers, and what it does to messages.

Calls and answers travel on connections: none is doubled, and one is lost only if its connection breaks. They overtake
each other all the same, as they do when many threads handle them. Batches and replies may be lost or doubled.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from farprop.protocol.references.messages import Batch, Fork, Reply
from tests.simulation.names import show

if TYPE_CHECKING:
    from tests.simulation.calls import Call
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


class Letter:
    """A call or an answer on its way."""

    __slots__ = ("call", "connection", "forks", "kind", "not_before", "number", "source", "target")

    def __init__(
        self, kind: str, call: Call, forks: list[Fork], source: int, target: int, connection: Connection | None
    ) -> None:
        self.kind = kind
        self.call = call
        self.forks = forks
        self.source = source
        self.target = target
        self.connection = connection  # none for what a worker sends to itself
        self.number = 0
        self.not_before = 0.0

    @property
    def certain(self) -> bool:
        """It comes, even if its connection breaks."""
        return self.kind == "calls" and self.call.certain

    def __str__(self) -> str:
        return f"{self.kind[:-1]} {self.call} with {show(self.forks)}"


class Network:
    def __init__(self, world: World) -> None:
        self.world = world
        self.in_flight: dict[int, Letter] = {}
        self.quiet = False  # no faults any more
        self._numbers = itertools.count(1)
        self._connections: list[Connection] = []
        self._island: frozenset[int] = frozenset()  # cut off from the others
        self._island_loses = False

    # Calls and answers

    def connect(self, caller: int, callee: int) -> Connection:
        connection = Connection(caller, callee, next(self._numbers))
        self._connections.append(connection)
        return connection

    def send(self, letter: Letter) -> None:
        self.world.counts[letter.kind] += 1
        self.world.counts["forks"] += len(letter.forks)
        self.world.say("%d -> %d: %s", letter.source, letter.target, letter)
        if letter.connection is not None and letter.connection.broken and not letter.certain:
            self.world.say("    lost: its connection is broken already")
            return
        letter.number = next(self._numbers)
        self.in_flight[letter.number] = letter
        makes = letter.kind == "calls" and letter.call.reference is not None
        late = makes and not self.quiet and self.world.chance.random() < self.world.weather.late
        delay = self._delay() + (self.world.chance.uniform(0.1, 3.0) if late else 0.0)
        self.world.clock.after(delay, self._deliver_letter, letter)

    def _deliver_letter(self, letter: Letter) -> None:
        if letter.number not in self.in_flight:
            return
        if self.apart(letter.source, letter.target) or letter.not_before > self.world.clock.now:
            self.world.clock.after(0.05 + self._delay(), self._deliver_letter, letter)
            return
        del self.in_flight[letter.number]
        if self._received(letter.source, letter.target):
            self.world.say("%d <- %d: %s", letter.target, letter.source, letter)
            self.world.workers[letter.target].receive(letter)

    def passes_on_early(self, rank: int) -> bool:
        """Whether a worker's message has a reference that came to it, and whose value may not be made yet."""
        return any(
            not fork.exists and fork.rref.created_on != rank
            for letter in self.in_flight.values()
            if letter.source == rank
            for fork in letter.forks
        )

    def break_one(self) -> None:
        """A connection breaks. What is on it is lost or comes all the same; both ends hear of it, each in its time."""
        whole = [c for c in self._connections if not c.broken]
        if whole and not self.quiet:
            self._break(self.world.chance.choice(whole))

    def _break(self, connection: Connection) -> None:
        chance = self.world.chance
        connection.broken = True
        self.world.counts["broken connections"] += 1
        self.world.say("connection %d from %d to %d breaks", connection.number, connection.caller, connection.callee)
        for letter in list(self.in_flight.values()):
            if letter.connection is connection and not letter.certain and chance.random() < 0.6:
                self.world.say("    %s is lost", letter)
                del self.in_flight[letter.number]
        for rank in (connection.caller, connection.callee):
            self.world.clock.after(self._delay(), self.world.workers[rank].connection_lost, connection)

    def cut_off(self, crashed: int) -> dict[int, float]:
        """A worker crashed. Some connections are seen to break before it is known to be dead; some of what it sent
        comes much later. Returns who hears from it until when.
        """
        chance = self.world.chance
        heard_until: dict[int, float] = {}
        held = chance.random() < 0.7
        for letter in self.in_flight.values():
            if letter.source == crashed and held:
                letter.not_before = heard_until[letter.target] = self.world.clock.now + chance.uniform(0.5, 2.0)
        for connection in self._connections:
            if not connection.broken and crashed in (connection.caller, connection.callee):
                connection.broken = True
                other = connection.callee if crashed == connection.caller else connection.caller
                if chance.random() < 0.5:
                    self.world.clock.after(self._delay(), self.world.workers[other].connection_lost, connection)
        return heard_until

    # Batches and replies

    def post(self, source: int, target: int, content: Batch | Reply) -> None:
        chance, weather = self.world.chance, self.world.weather
        self.world.counts["batches" if isinstance(content, Batch) else "replies"] += 1
        if not self.quiet and chance.random() < weather.loss:
            self.world.counts["lost messages"] += 1
            self.world.say("%d -> %d: %s is lost", source, target, content)
            return
        self.world.say("%d -> %d: %s", source, target, content)
        self.world.clock.after(self._delay(), self._deliver_content, source, target, content)
        if not self.quiet and chance.random() < weather.duplication:
            self.world.counts["doubled messages"] += 1
            self.world.clock.after(self._delay(), self._deliver_content, source, target, content)

    def _deliver_content(self, source: int, target: int, content: Batch | Reply) -> None:
        if self.apart(source, target):
            if self._island_loses:
                self.world.counts["lost messages"] += 1
            else:
                self.world.clock.after(0.1 + self._delay(), self._deliver_content, source, target, content)
        elif self._received(source, target):
            self.world.say("%d <- %d: %s", target, source, content)
            self.world.workers[target].take(source, content)

    def _received(self, source: int, target: int) -> bool:
        """Whether the receiver hears it. One that takes the sender for dead refuses, and the sender notices."""
        receiver = self.world.workers[target]
        if receiver.crashed:
            return False
        if source not in receiver.state.dead:
            return True
        self.world.clock.after(self._delay(), self.world.workers[source].hear_death, target)
        return False

    # Partitions and delays

    def part(self) -> None:
        """Some workers are cut off from the others for a while. Connections across may break."""
        chance = self.world.chance
        ranks = list(range(len(self.world.workers)))
        self._island = frozenset(chance.sample(ranks, chance.randint(1, len(ranks) - 1)))
        self._island_loses = chance.random() < 0.5
        self.world.counts["partitions"] += 1
        self.world.say("workers %s are cut off", sorted(self._island))
        for connection in list(self._connections):
            if not connection.broken and self.apart(connection.caller, connection.callee) and chance.random() < 0.3:
                self._break(connection)

    def heal(self) -> None:
        if self._island:
            self.world.say("workers %s are back", sorted(self._island))
        self._island = frozenset()

    def apart(self, one: int, other: int) -> bool:
        return (one in self._island) != (other in self._island)

    def _delay(self) -> float:
        chance = self.world.chance
        if not self.quiet and chance.random() < self.world.weather.slow:
            return chance.uniform(0.05, 1.0)
        return chance.uniform(0.001, 0.02)
