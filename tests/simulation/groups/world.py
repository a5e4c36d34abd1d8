"""One run: everything that follows from a seed.

A rank sends the fingerprint of each collective to some others, waits for those that send it one, and continues.
Messages between two ranks arrive in order, those of different ranks in any order. A run has at most one fault.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

from farprop.errors import CollectiveError, CollectiveMismatchError, RankLostError
from farprop.protocol.collective_consistency import CollectiveConsistency
from tests.simulation.harness import Outcome, Violation

SIZE = 4
_ODD = "something else"
FAULTS = {"none": "", "mismatch": "mismatches", "death": "deaths", "parting": "partings"}


class Rank:
    def __init__(self, rank: int, program: list[str]) -> None:
        self.machine = CollectiveConsistency(rank, SIZE)
        self.program = deque(program)
        self.awaited: set[int] = set()
        self.came: dict[int, set[int]] = {}
        self.error: CollectiveError | None = None
        self.has_told = False
        self.is_gone = False  # it died, or it has left

    @property
    def is_over(self) -> bool:
        return self.is_gone or self.error is not None or not (self.program or self.awaited)


class World:
    def __init__(self, seed: int, tracing: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.tracing = tracing
        self.counts: Counter[str] = Counter()
        length = chance.randrange(1, 6)
        programs = [[f"collective {number}" for number in range(length)] for _ in range(SIZE)]
        self.kinds = [chance.choice(["circle", "all", "broadcast"]) for _ in range(length)]
        self.fault = chance.choice(list(FAULTS))
        self.culprit, self.other = chance.sample(range(SIZE), 2)
        self.when = chance.randrange(length)
        if self.fault == "mismatch":
            programs[self.culprit][self.when] = _ODD
            self.counts["mismatches"] += 1
        self.ranks = [Rank(rank, program) for rank, program in enumerate(programs)]
        self.wires: dict[tuple[int, int], deque[tuple[Any, ...]]] = {
            (a, b): deque() for a in range(SIZE) for b in range(SIZE) if a != b
        }
        self.say("%s, rank %d, collective %d; %s", self.fault, self.culprit, self.when + 1, self.kinds)

    def say(self, text: str, *things: object) -> None:
        if self.tracing:
            print(text % things)

    def run(self) -> None:
        while moves := list(self._moves()):
            self.counts["steps"] += 1
            move = self.chance.choice(moves)
            if isinstance(move, Rank):
                self._begin(move)
                self._notice(move)
            else:
                self._deliver(*move)
                self._notice(self.ranks[move[1]])
            for rank in self.ranks:
                rank.machine.validate()
        self._check()

    def _moves(self) -> Iterator[Rank | tuple[int, int]]:
        yield from (wire for wire, words in self.wires.items() if words)
        yield from (rank for rank in self.ranks if not rank.is_over and not rank.awaited)

    # What ranks do

    def _plan(self, rank: int, kind: str) -> tuple[set[int], set[int]]:
        """Whom a rank sends to in a collective, and whom it waits for."""
        others = set(range(SIZE)) - {rank}
        if kind == "all":
            return others, others
        if kind == "circle":
            return {(rank + 1) % SIZE}, {(rank - 1) % SIZE}
        if kind == "broadcast":
            return (others, set()) if rank == 0 else (set(), {0})
        return {(rank + 1) % SIZE}, set()

    def _begin(self, rank: Rank) -> None:
        own, fingerprint = rank.machine.rank, rank.program.popleft()
        try:
            number = rank.machine.begin(fingerprint)
        except CollectiveError as error:
            rank.error = error
            return
        self.say("rank %d begins %s", own, fingerprint)
        if own == self.culprit and number == self.when + 1:
            if self.fault == "death":
                self._die(rank)
                return
            if self.fault == "parting":
                self._cut_pair()
        targets, sources = self._plan(own, _ODD if fingerprint == _ODD else self.kinds[number - 1])
        for target in targets:
            self._send(own, target, "part", number, fingerprint)
        rank.awaited = sources - rank.came.get(number, set())
        self._finish(rank)

    def _send(self, source: int, target: int, *words: Any) -> None:
        if not (self.counts["partings"] and {source, target} == {self.culprit, self.other}):
            self.counts[f"{words[0]} words"] += 1
            self.wires[source, target].append(words)

    def _tell_all(self, rank: Rank, *words: Any) -> None:
        own = rank.machine.rank
        for other in set(range(SIZE)) - {own}:
            self._send(own, other, *words)

    def _die(self, rank: Rank) -> None:
        self.say("rank %d dies", rank.machine.rank)
        self.counts["deaths"] += 1
        rank.is_gone = True
        self._tell_all(rank, "closed")

    def _cut_pair(self) -> None:
        """Two ranks can no longer reach each other; the others reach both."""
        pair = self.culprit, self.other
        if self.ranks[self.other].is_gone:
            return
        self.say("ranks %d and %d are parted", *pair)
        self.counts["partings"] += 1
        for wire in (pair, pair[::-1]):
            self.wires[wire].clear()
            self.wires[wire].append(("closed",))

    def _finish(self, rank: Rank) -> None:
        """A rank that is done leaves. In runs with a mismatch it stays, because leaving would hide it."""
        if rank.is_over and rank.error is None and not rank.is_gone and self.fault != "mismatch":
            self._leave(rank)

    def _leave(self, rank: Rank) -> None:
        failure = rank.machine.failure
        self.say("rank %d leaves", rank.machine.rank)
        self._tell_all(rank, "goodbye", *("", "") if failure is None else (type(failure).__name__, str(failure)))
        rank.is_gone = True

    def _deliver(self, source: int, target: int) -> None:
        kind, *rest = self.wires[source, target].popleft()
        rank = self.ranks[target]
        if rank.is_gone:
            return
        if kind == "part":
            number, fingerprint = rest
            rank.machine.on_fingerprint(source, number, fingerprint)
            rank.came.setdefault(number, set()).add(source)
            if number == rank.machine.number:
                rank.awaited.discard(source)
        elif kind == "closed":
            rank.machine.on_peer_lost(source, "its connection has closed")
        elif kind == "goodbye":
            rank.machine.on_peer_left(source, *rest)
            if source in rank.awaited and rank.machine.failure is None:
                raise Violation(f"rank {source} left before rank {target} had its part")
        else:
            rank.machine.on_peer_failure(source, *rest)

    def _notice(self, rank: Rank) -> None:
        failure = rank.machine.failure
        if failure is None or rank.is_gone:
            self._finish(rank)
            return
        if not rank.machine.is_announced and not rank.has_told:
            self.say("rank %d tells: %s", rank.machine.rank, failure)
            rank.has_told = True
            self._tell_all(rank, "broken", type(failure).__name__, str(failure))
        if not rank.is_over:
            rank.error = failure
            if self.chance.random() < 0.5:
                self._leave(rank)  # others may hear this before they hear who found the failure

    # What must hold in the end

    def _check(self) -> None:
        for rank in self.ranks:
            if not rank.is_over:
                raise Violation(f"rank {rank.machine.rank} waits for ever")
            failure = rank.machine.failure
            if not self.counts[FAULTS[self.fault]]:
                if failure is not None:
                    raise Violation(f"nothing was wrong, but: {failure}")
            elif rank.is_gone and rank.error is None:
                continue
            elif self.fault == "mismatch":
                if not isinstance(failure, CollectiveMismatchError):
                    raise Violation("a mismatch is known to all")
                if f"ank {self.culprit} called {_ODD}" not in str(failure):
                    raise Violation(f"it names somebody else: {failure}")
            else:
                names = [self.culprit] if self.fault == "death" else [self.culprit, self.other]
                if not isinstance(failure, RankLostError):
                    raise Violation("a lost rank is known to all")
                if not any(f"lost rank {name}" in str(failure) for name in names):
                    raise Violation(f"it names somebody else: {failure}")


def run(seed: int, tracing: bool = False) -> Outcome:
    world = World(seed, tracing)
    failure = None
    try:
        world.run()
    except (Violation, AssertionError) as error:
        failure = str(error) or type(error).__name__
    return Outcome(seed, failure, world.counts, "groups")
