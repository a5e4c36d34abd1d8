"""A rank that is killed is an error on all others, whatever they do."""

from __future__ import annotations

import random
import re
import signal

import pytest

from farprop.errors import CollectiveTimeoutError, RankLostError
from tests.groups.native import endless
from tests.groups.native.layouts import environment
from tests.support.workers import Cluster, processes

SIZE = 4


def join_all(job: Cluster, size: int = SIZE) -> None:
    for start in [job.start(rank, endless.join, rank, size) for rank in range(size)]:
        start.result()


def check_lost(ending: endless.Ending, ranks: set[int]) -> None:
    """The error says that one of these ranks is lost."""
    assert isinstance(ending.error, RankLostError), repr(ending.error)
    named = re.search(r"(?:lost|can't reach) rank (\d+)", str(ending.error))
    assert named, ending.error
    assert int(named[1]) in ranks, ending.error


def kill_during_collectives(layout: str, kinds: list[str], seed: int) -> None:
    dice = random.Random(seed)
    victim = dice.randrange(SIZE)
    with processes(SIZE, environment(layout, SIZE)) as job:
        join_all(job)
        runs = [job.start(rank, endless.run, kinds, seed) for rank in range(SIZE)]
        job.run(victim, endless.await_collectives, dice.randrange(1, 40))
        job.kill(victim)
        others = [rank for rank in range(SIZE) if rank != victim]
        for rank in others:
            check_lost(runs[rank].result(), {victim})
        # Later collectives of every kind fail, too.
        for kind in kinds:
            for once in [job.start(rank, endless.once, kind) for rank in others]:
                check_lost(once.result(), {victim})
        for end in [job.start(rank, endless.leave) for rank in others]:
            end.result()


@pytest.mark.parametrize("layout", ["one", "two"])
@pytest.mark.parametrize("kind", endless.KINDS)
def test_a_rank_killed_during_one_kind_of_collective(kind, layout):
    kill_during_collectives(layout, [kind], seed=len(kind))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("layout", ["one", "two", "tcp"])
def test_a_rank_killed_during_any_collective(layout, seed):
    kill_during_collectives(layout, list(endless.KINDS), seed)


@pytest.mark.parametrize("layout", ["one", "two", "tcp"])
def test_a_killed_rank_that_no_rank_waits_for(layout):
    with processes(SIZE, environment(layout, SIZE)) as job:
        join_all(job)
        # Rank 0 waits for a message of rank 1, which is alive and does not send.
        waiting = job.start(0, endless.receive, 1)
        job.run(0, endless.await_receiving)
        job.kill(3)
        check_lost(waiting.result(), {3})
        for rank in (1, 2):  # they call a collective later
            check_lost(job.run(rank, endless.once, "all_reduce"), {3})
        for end in [job.start(rank, endless.leave) for rank in (0, 1, 2)]:
            end.result()


@pytest.mark.parametrize("layout", ["one", "two", "tcp"])
def test_groups_without_the_killed_rank_go_on(layout):
    with processes(SIZE, environment(layout, SIZE)) as job:
        join_all(job)
        for made in [job.start(rank, endless.make_groups, [[0, 2], [1, 2, 3]]) for rank in range(SIZE)]:
            made.result()
        waiting = job.start(1, endless.reduce_in, 1)
        job.kill(3)
        check_lost(waiting.result(), {2})  # the group's rank 2 is rank 3
        check_lost(job.run(2, endless.reduce_in, 1), {2})
        assert [alive.result() for alive in [job.start(rank, endless.reduce_in, 0) for rank in (0, 2)]] == [None] * 2
        for end in [job.start(rank, endless.leave) for rank in (0, 1, 2)]:
            end.result()


def test_a_rank_that_is_stopped_until_the_others_time_out():
    """Half a frame was sent to it, so the other rank can't tell it why it gave up; it must not wait forever."""
    with processes(2, environment("tcp", 2)) as job:
        for start in [job.start(rank, endless.join, rank, 2, seconds) for rank, seconds in enumerate((2, 1800))]:
            start.result()
        job.signal(1, signal.SIGSTOP)
        assert isinstance(job.run(0, endless.once, "broadcast", endless.MUCH).error, CollectiveTimeoutError)
        job.signal(1, signal.SIGCONT)
        check_lost(job.run(1, endless.once, "broadcast", endless.MUCH), {0})
        for end in [job.start(rank, endless.leave) for rank in range(2)]:
            end.result()
