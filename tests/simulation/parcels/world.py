"""One run: everything that follows from a seed.

Rank 0 calls the workers of other hosts, and sends a parcel. Messages between two workers arrive in order, those of
different ones in any order. Workers crash between any two events, stop for good or for a while, and can't reach each
other; a sender may lose its patience although nobody has stopped.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

from farprop.protocol.parcels import (
    Arrivals,
    Chunks,
    ChunkWindow,
    GiveUp,
    ParcelId,
    Relay,
    Route,
    Send,
    Spread,
    Stop,
    hosts_of,
)
from tests.simulation.harness import Outcome, Violation

CALLER = 0
PARCEL = ParcelId(CALLER, 7)
FAULTS = ("crashes", "crashes of the caller", "stops", "pauses", "partitions", "impatience")
_MOST_STEPS = 5000


class Sender:
    """One way of chunks, from the caller or a relay to a relay."""

    def __init__(self, world: World, source: int, route: Route, on_end: Callable[[list[int] | None], None]) -> None:
        self.world, self.source, self.to, self.on_end = world, source, route[0][0].rank, on_end
        self.window = ChunkWindow(world.chunks, 2)
        self.on_stalled: Callable[[], None] = self.stop
        self.is_over = self.has_stalled = False
        world.senders.append(self)
        if not world.send(source, self.to, "parcel", route):
            self.end(None)

    def go_on(self) -> None:
        while not self.is_over and (index := self.window.take()) is not None:
            self.world.counts["chunks"] += 1
            if not self.world.send(self.source, self.to, "chunk", index):
                self.end(None)

    def stop(self) -> None:
        """Send no more, and say so."""
        self.world.send(self.source, self.to, "stopped", None)
        self.end(None)

    def end(self, missing: list[int] | None) -> None:
        if not self.is_over:
            self.is_over = True
            self.on_end(missing)


class Incoming:
    def __init__(self, chunks: int) -> None:
        self.chunks = Chunks(chunks)
        self.stored: set[int] = set()
        self.relay: Relay | None = None
        self.uses = 0
        self.next: Sender | None = None
        self.is_complete = self.is_shared = False


class Worker:
    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.arrivals: Arrivals[int] = Arrivals()
        self.incoming: dict[int, Incoming] = {}
        self.ended: set[int] = set()
        self.has_parcel = False
        self.ran: Counter[int] = Counter()
        self.is_dead = self.is_stopped = False

    def run(self, request: int) -> None:
        if not self.has_parcel:
            raise Violation(f"rank {self.rank} runs a call without its arguments")
        self.ran[request] += 1

    def receive(self, source: int, word: str, thing: Any) -> None:
        getattr(self, f"on_{word}")(source, thing)
        self.arrivals.validate()

    def on_request(self, source: int, request: int) -> None:
        if self.arrivals.request(PARCEL, request):
            self.run(request)

    def arrive(self, uses: int) -> None:
        self.has_parcel = True
        for request in self.arrivals.arrived(PARCEL, uses) or ():
            self.run(request)

    def on_share(self, source: int, uses: int) -> None:
        self.arrive(uses)
        self.world.send(self.rank, source, "has_it", None)

    def _from(self, source: int) -> Incoming | None:
        if source in self.ended:
            return None
        return self.incoming.setdefault(source, Incoming(self.world.chunks))

    def on_parcel(self, source: int, route: Route) -> None:
        if source == CALLER:  # it does not wait for others who were to bring it
            for key, other in list(self.incoming.items()):
                if key != CALLER:
                    self.forget(key, other)
        incoming = self._from(source)
        if incoming is None:
            return
        incoming.relay, incoming.uses = Relay(route), route[0][0].uses
        if incoming.relay.behind:
            sender = Sender(
                self.world, self.rank, incoming.relay.behind, lambda missing: self.behind(source, incoming, missing)
            )
            incoming.next = sender
            sender.window.offer(sorted(incoming.stored))
            sender.go_on()
        self.share_if_complete(source, incoming)

    def on_chunk(self, source: int, index: int) -> None:
        self.world.send(self.rank, source, "confirmed", index)
        incoming = self._from(source)
        if incoming is None or not incoming.chunks.claim(index):
            return
        incoming.stored.add(index)
        if incoming.chunks.on_stored():
            incoming.is_complete = True
        if incoming.next is not None:
            incoming.next.window.offer([index])
            incoming.next.go_on()
        self.share_if_complete(source, incoming)

    def share_if_complete(self, source: int, incoming: Incoming) -> None:
        relay = incoming.relay
        if relay is None or not incoming.is_complete or incoming.is_shared:
            return
        if len(incoming.stored) < self.world.chunks:
            raise Violation(f"rank {self.rank} shares a parcel that it does not have")
        incoming.is_shared = True
        for rank, uses in relay.near:
            if not self.world.send(self.rank, rank, "share", uses):
                relay.on_share_failed(rank)
        self.arrive(incoming.uses)
        relay.on_complete()
        self.report(source, incoming, relay)

    def on_has_it(self, near: int, _: object) -> None:
        self.on_near(near, Relay.on_shared)

    def on_near(self, near: int, event: Callable[[Relay, int], None]) -> None:
        for source, incoming in list(self.incoming.items()):
            if incoming.relay is not None and incoming.is_shared:
                event(incoming.relay, near)
                self.report(source, incoming, incoming.relay)

    def lose_patience_with_near(self) -> None:
        for source, incoming in list(self.incoming.items()):
            if incoming.relay is not None and incoming.is_shared:
                incoming.relay.on_shares_overdue()
                self.report(source, incoming, incoming.relay)

    def behind(self, source: int, incoming: Incoming, missing: list[int] | None) -> None:
        relay = incoming.relay
        assert relay is not None
        if missing is None:
            relay.on_behind_lost()
        else:
            relay.on_behind_done(missing)
        self.report(source, incoming, relay)

    def report(self, source: int, incoming: Incoming, relay: Relay) -> None:
        if relay.report is not None and self.incoming.get(source) is incoming:
            del self.incoming[source]
            self.ended.add(source)
            self.world.send(self.rank, source, "report", relay.report)

    def on_confirmed(self, source: int, index: int) -> None:
        for sender in self.world.senders_of(self.rank, source):
            sender.window.on_confirmed()
            sender.go_on()

    def on_report(self, source: int, missing: list[int]) -> None:
        for sender in self.world.senders_of(self.rank, source):
            sender.end(missing)

    def on_lost(self, source: int, _: object) -> None:
        """A connection from or to this worker is lost."""
        for sender in self.world.senders_of(self.rank, source):
            sender.end(None)
        if source == CALLER:
            self.arrivals.drop(PARCEL)
        self.on_near(source, Relay.on_share_failed)
        for key, incoming in list(self.incoming.items()):
            if source in (key, CALLER):
                self.forget(key, incoming)

    def on_stopped(self, source: int, _: object) -> None:
        """A source sends no more."""
        incoming = self._from(source)
        if incoming is not None:
            self.forget(source, incoming)

    def forget(self, source: int, incoming: Incoming) -> None:
        if not incoming.is_shared:
            del self.incoming[source]
            self.ended.add(source)
            if incoming.relay is not None:
                self.world.send(self.rank, source, "report", incoming.relay.all_ranks)
            if incoming.next is not None:
                incoming.next.is_over = True
                self.world.send(self.rank, incoming.next.to, "stopped", None)


class World:
    def __init__(self, seed: int, tracing: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.tracing = tracing
        self.counts: Counter[str] = Counter()
        self.chunks = chance.randrange(1, 5)
        hosts = chance.randrange(1, 5)
        self.host_of = {}
        self.uses: dict[int, int] = {}
        for host in range(hosts):
            for _ in range(chance.randrange(1, 5)):
                rank = len(self.host_of) + 1
                self.host_of[rank] = f"host{host}"
                self.uses[rank] = chance.choice((1, 1, 1, 2))
        self.workers = [Worker(self, rank) for rank in range(len(self.host_of) + 1)]
        self.wires: dict[tuple[int, int], deque[tuple[str, Any]]] = {}
        self.senders: list[Sender] = []
        self.parted: set[frozenset[int]] = set()
        self.given_up: set[int] = set()
        self.impatience = 0
        self.faults = {fault for fault in FAULTS if chance.random() < 0.25}
        if "partitions" in self.faults and len(self.host_of) > 1:
            for _ in range(chance.randrange(1, 4)):
                self.parted.add(frozenset(chance.sample(sorted(self.host_of), 2)))
                self.counts["partitions"] += 1
        if "impatience" in self.faults:
            self.impatience = chance.randrange(1, 4)
        # How many events pass before each crash, stop or pause.
        self.plan = [
            (chance.randrange(60), fault) for fault in sorted(self.faults) for _ in range(chance.randrange(1, 3))
        ]
        stops = [(self.host_of[rank], Stop(rank, self.uses[rank])) for rank in self.host_of]
        self.spread = Spread(hosts_of(stops))

    def say(self, text: str, *things: object) -> None:
        if self.tracing:
            print(text % things)

    def send(self, source: int, target: int, word: str, thing: Any) -> bool:
        """Send a message; False if the other can't be reached."""
        if self.workers[target].is_dead or frozenset((source, target)) in self.parted:
            return False
        if not self.workers[source].is_dead:
            self.wires.setdefault((source, target), deque()).append((word, thing))
        return True

    def senders_of(self, source: int, to: int) -> list[Sender]:
        return [sender for sender in self.senders if (sender.source, sender.to) == (source, to) and not sender.is_over]

    # The caller

    def start(self) -> None:
        number = 0
        for rank, uses in self.uses.items():
            for _ in range(uses):
                number += 1
                self.send(CALLER, rank, "request", number)
        self.perform(self.spread.start())

    def perform(self, actions: list[Send | GiveUp]) -> None:
        self.spread.validate()
        for action in actions:
            if isinstance(action, GiveUp):
                self.given_up.add(action.rank)
                continue
            self.counts["routes"] += 1
            self.say("the caller sends to %s", action.route)
            sender = Sender(self, CALLER, action.route, lambda missing, to=action.relay: self.ended(to, missing))
            sender.on_stalled = lambda to=action.relay: self.perform(self.spread.on_stalled(to))
            sender.window.offer(range(self.chunks))
            sender.go_on()

    def ended(self, relay: int, missing: list[int] | None) -> None:
        for rank in self.host_of:
            if self.workers[rank].is_dead:
                self.spread.on_ended(rank)
        self.perform(self.spread.on_lost(relay) if missing is None else self.spread.on_done(relay, missing))

    # What happens

    def run(self) -> None:
        self.start()
        while moves := list(self._moves()):
            self.chance.choice(moves)()
            self.counts["steps"] += 1
            if self.counts["steps"] > _MOST_STEPS:
                raise Violation("it goes on for ever")
            self._fault()
        self._check()

    def _moves(self) -> Iterator[Callable[[], None]]:
        for wire, words in self.wires.items():
            worker = self.workers[wire[1]]
            if words and not worker.is_dead and not worker.is_stopped:
                yield lambda wire=wire: self._deliver(wire)
        for sender in self.senders:
            target, source = self.workers[sender.to], self.workers[sender.source]
            if sender.is_over or sender.has_stalled or source.is_dead or source.is_stopped:
                continue
            if target.is_stopped or (self.impatience and self.chance.random() < 0.1):
                yield lambda sender=sender, spurious=not target.is_stopped: self._stall(sender, spurious)
        for worker in self.workers:
            if worker.is_dead or worker.is_stopped:
                continue
            near = [stop.rank for i in worker.incoming.values() if i.relay and i.is_shared for stop in i.relay.near]
            if any(self.workers[rank].is_stopped for rank in near):
                yield worker.lose_patience_with_near
        for worker in self.workers:
            if worker.is_stopped and "pauses" in self.faults:
                yield lambda worker=worker: self._resume(worker)

    def _deliver(self, wire: tuple[int, int]) -> None:
        words = self.wires[wire]
        if words and not self.workers[wire[1]].is_dead:
            word, thing = words.popleft()
            self.say("%d -> %d: %s %s", *wire, word, thing)
            self.workers[wire[1]].receive(wire[0], word, thing)

    def _stall(self, sender: Sender, spurious: bool) -> None:
        if sender.is_over:
            return
        self.say("%d waits for %d no longer", sender.source, sender.to)
        if spurious:
            self.impatience -= 1
            self.counts["impatience"] += 1
        sender.has_stalled = True
        sender.on_stalled()

    def _resume(self, worker: Worker) -> None:
        worker.is_stopped = False

    def _fault(self) -> None:
        for entry in [entry for entry in self.plan if entry[0] <= self.counts["steps"]]:
            self.plan.remove(entry)
            fault = entry[1]
            if fault in ("partitions", "impatience"):
                continue
            rank = CALLER if fault == "crashes of the caller" else self.chance.choice(sorted(self.host_of))
            worker = self.workers[rank]
            if worker.is_dead:
                continue
            self.counts[fault] += 1
            self.say("%s: %d", fault, rank)
            if fault in ("stops", "pauses"):
                worker.is_stopped = True
            else:
                self._crash(worker)

    def _crash(self, worker: Worker) -> None:
        worker.is_dead = True
        for other in self.workers:
            if other is worker:
                continue
            sent = self.wires.setdefault((worker.rank, other.rank), deque())
            for _ in range(self.chance.randrange(len(sent) + 1)):
                sent.pop()
            sent.append(("lost", None))
            self.wires.pop((other.rank, worker.rank), None)

    def _check(self) -> None:
        caller = self.workers[CALLER]
        for worker in self.workers[1:]:
            if any(times > 1 for times in worker.ran.values()):
                raise Violation(f"rank {worker.rank} runs a call twice")
            if worker.is_dead or worker.is_stopped:
                continue
            if not caller.is_dead:
                if worker.rank in self.given_up:
                    raise Violation(f"rank {worker.rank} lives, and is given up")
                if len(worker.ran) != self.uses[worker.rank]:
                    raise Violation(f"rank {worker.rank} ran {len(worker.ran)} of {self.uses[worker.rank]} calls")
            elif not worker.arrivals.held():
                worker.arrivals.drop(PARCEL)  # nobody claims it
            if not worker.arrivals.is_empty or (worker.incoming and not self._waits(worker)):
                raise Violation(f"rank {worker.rank} keeps something")
        if not caller.is_dead and not any(worker.is_stopped for worker in self.workers) and not self.spread.is_over:
            raise Violation("the caller goes on waiting")
        if not self.faults and self.counts["chunks"] != self.chunks * len(set(self.host_of.values())):
            raise Violation("a link is crossed more than once")

    def _waits(self, worker: Worker) -> bool:
        """Whether what a worker keeps is there because a worker before it has stopped."""
        sources = [self.workers[source] for source in worker.incoming]
        return bool(sources) and all(source.is_stopped or self._waits(source) for source in sources)


def run(seed: int, tracing: bool = False) -> Outcome:
    world = World(seed, tracing)
    failure = None
    try:
        world.run()
    except (Violation, AssertionError) as error:
        failure = f"{type(error).__name__}: {error}"
    return Outcome(seed, failure, world.counts, "parcels")
