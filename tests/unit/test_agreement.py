"""Who called what: the machine, alone and in simulated groups in which statements come in any order."""

from __future__ import annotations

import random
from collections import deque
from unittest import mock

import pytest

from farprop.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, RankLostError
from farprop.protocol.agreement import Agreement


def test_statements_that_agree():
    ours = Agreement(0, 3)
    assert ours.begin("a") == 1
    ours.hear(1, 1, "a")
    ours.hear(2, 2, "b")  # it is ahead
    assert ours.begin("b") == 2
    ours.hear(1, 2, "b")
    ours.hear(2, 1, "a")  # and this one was slow
    assert ours.failure is None
    ours.validate()


@pytest.mark.parametrize("when", ["before", "after", "much later"])
def test_statements_that_differ(when):
    ours = Agreement(0, 3)
    if when == "before":
        ours.hear(2, 1, "b")
        with pytest.raises(CollectiveMismatchError):
            ours.begin("a")
    else:
        ours.begin("a")
        if when == "much later":
            ours.begin("c")
        ours.hear(2, 1, "b")
    assert "Rank 0 called a, and rank 2 called b, as collective 1" in str(ours.failure)
    assert not ours.is_announced
    with pytest.raises(CollectiveMismatchError):
        ours.begin("d")
    ours.validate()


def test_what_is_long_past_is_not_kept():
    ours = Agreement(0, 2)
    for _ in range(1000):
        ours.begin("a")
    ours.validate()
    ours.hear(1, 1, "b")
    assert ours.failure is None


def test_who_is_blamed_for_a_timeout():
    ours = Agreement(0, 4)
    ours.begin("a")
    ours.give_up([1], 2.0)
    assert isinstance(ours.failure, CollectiveTimeoutError)
    assert "in a, collective 1 of the group, after a timeout of 2 s: it waited for rank 1." in str(ours.failure)
    ours = Agreement(0, 4)
    ours.begin("a")
    ours.hear(1, 1, "a")  # it came, so it waits for somebody else
    ours.give_up([1], 2.0)
    assert "it waited for ranks 2, 3." in str(ours.failure)
    ours = Agreement(0, 2)
    ours.begin("a")
    ours.hear(1, 1, "a")
    ours.give_up([1], 2.0)
    assert "it waited for rank 1." in str(ours.failure)


def test_a_rank_that_leaves_is_not_a_dead_one():
    ours = Agreement(0, 3)
    ours.begin("a")
    ours.leave(1)
    ours.die(1, "its connection has closed")
    assert ours.blame([2]) is None
    assert isinstance(ours.blame([1, 2]), RankLostError)
    # In a reduce to rank 2 it has sent its part, and left. Ours is still to come.
    assert ours.begin("b") == 2
    assert ours.blame([2]) is None
    assert "Rank 1 has left the group" in str(ours.blame([1]))


def test_the_first_failure_stays():
    ours = Agreement(0, 3)
    ours.begin("a")
    ours.die(1, "its connection has closed")
    ours.be_told(2, "CollectiveMismatchError", "something else")
    assert "lost rank 1" in str(ours.failure)
    assert ours.is_announced  # everybody sees a death


# Simulated groups: a rank states each collective to some others, waits for all of those that state to it, and goes on.


class Rank:
    def __init__(self, rank: int, program: list[str]) -> None:
        self.machine = Agreement(rank, SIZE)
        self.program = deque(program)
        self.awaited: set[int] = set()
        self.error: CollectiveError | None = None
        self.is_dead = False

    @property
    def is_over(self) -> bool:
        return self.is_dead or self.error is not None or not (self.program or self.awaited)


SIZE = 4


def plan(rank: int, kind: str) -> tuple[set[int], set[int]]:
    """Whom a rank sends to in a collective, and whom it waits for."""
    others = set(range(SIZE)) - {rank}
    if kind == "all":
        return others, others
    if kind == "circle":
        return {(rank + 1) % SIZE}, {(rank - 1) % SIZE}
    if kind == "broadcast":
        return (others, set()) if rank == 0 else (set(), {0})
    return {(rank + 1) % SIZE}, set()


def simulate(seed: int) -> list[Rank]:
    """One job to its end. ``AssertionError`` if that is wrong, or never comes."""
    dice = random.Random(seed)
    length = dice.randrange(1, 6)
    programs = [[f"collective {number}" for number in range(length)] for _ in range(SIZE)]
    fault = dice.choice(["none", "mismatch", "death"])
    culprit, when = dice.randrange(SIZE), dice.randrange(length)
    if fault == "mismatch":
        programs[culprit][when] = "something else"
    kinds = [dice.choice(["circle", "all", "broadcast"]) for _ in range(length)]
    ranks = [Rank(rank, program) for rank, program in enumerate(programs)]
    wires: dict[tuple[int, int], deque[tuple]] = {(a, b): deque() for a in range(SIZE) for b in range(SIZE) if a != b}
    came: dict[tuple[int, int], set[int]] = {}
    told: set[int] = set()

    def begin(rank: Rank) -> None:
        own = rank.machine.rank
        statement = rank.program.popleft()
        try:
            number = rank.machine.begin(statement)
        except CollectiveError as error:
            rank.error = error
            return
        if fault == "death" and own == culprit and number == when + 1:
            rank.is_dead = True
            for other in set(range(SIZE)) - {own}:
                wires[own, other].append(("died",))
            return
        targets, sources = plan(own, statement if statement == "something else" else kinds[number - 1])
        for target in targets:
            wires[own, target].append(("part", number, statement))
        rank.awaited = sources - came.get((own, number), set())

    def deliver(source: int, target: int) -> None:
        kind, *rest = wires[source, target].popleft()
        rank = ranks[target]
        if rank.is_dead:
            return
        if kind == "part":
            number, statement = rest
            rank.machine.hear(source, number, statement)
            came.setdefault((target, number), set()).add(source)
            if number == rank.machine.number:
                rank.awaited.discard(source)
        elif kind == "died":
            rank.machine.die(source, "its connection has closed")
        else:
            rank.machine.be_told(source, *rest)

    def notice(rank: Rank) -> None:
        own, failure = rank.machine.rank, rank.machine.failure
        if failure is None:
            return
        if not rank.machine.is_announced and own not in told:
            told.add(own)
            for other in set(range(SIZE)) - {own}:
                wires[own, other].append(("broken", type(failure).__name__, str(failure)))
        if rank.awaited or rank.program:
            rank.error = failure

    while True:
        moves: list = [wire for wire, queue in wires.items() if queue]
        moves += [rank for rank in ranks if not rank.is_over and not rank.awaited]
        if not moves:
            break
        move = dice.choice(moves)
        if isinstance(move, Rank):
            begin(move)
            notice(move)
        else:
            deliver(*move)
            notice(ranks[move[1]])
        for rank in ranks:
            rank.machine.validate()

    assert all(rank.is_over for rank in ranks), "somebody waits for ever"
    if fault == "none":
        assert not any(rank.machine.failure for rank in ranks), "nothing was wrong"
    for rank in ranks:
        failure = rank.machine.failure
        if fault == "death" and not rank.is_dead:
            assert isinstance(failure, RankLostError), "a death is known to all"
            assert f"lost rank {culprit}" in str(failure)
        elif fault == "mismatch":
            assert isinstance(failure, CollectiveMismatchError), "a mismatch is known to all"
            assert "something else" in str(failure)
            assert f"ank {culprit} called something else" in str(failure)
    return ranks


@pytest.mark.parametrize("start", range(0, 4000, 1000))
def test_simulated_groups(start):
    for seed in range(start, start + 1000):
        simulate(seed)


def forget_what_is_early(self, rank, number, statement):
    if number == self.number and self._own[number] != statement:
        self._fail(CollectiveMismatchError(f"Rank {self.rank} called {self._own[number]}, rank {rank} {statement}"))


def forget_what_is_past(self, rank, number, statement):
    if number >= self.number:
        HEALTHY["hear"](self, rank, number, statement)


def blame_ourselves(self, rank, number, statement):
    HEALTHY["hear"](self, self.rank if number == self.number else rank, number, statement)


def take_death_lightly(self, rank, why):
    self.leave(rank)


def keep_it_to_ourselves(self, error):
    HEALTHY["_fail"](self, error)
    self.is_announced = True


def believe_only_ourselves(self, rank, kind, text):
    pass


HEALTHY = {name: getattr(Agreement, name) for name in ("hear", "die", "_fail", "be_told")}
FLAWS = [
    ("hear", forget_what_is_early),
    ("hear", forget_what_is_past),
    ("hear", blame_ourselves),
    ("die", take_death_lightly),
    ("_fail", keep_it_to_ourselves),
    ("be_told", believe_only_ourselves),
]


@pytest.mark.parametrize(("method", "flaw"), FLAWS, ids=[flaw.__name__ for _, flaw in FLAWS])
def test_planted_flaws_are_found(method, flaw):
    with mock.patch.object(Agreement, method, flaw):
        for seed in range(2000):
            try:
                simulate(seed)
            except AssertionError:
                return
    pytest.fail("no simulated group noticed it")
