"""The consistency check of collectives: fingerprints, timeouts and lost ranks, one event at a time.

``tests.simulation.groups`` runs the same state machine in simulated groups.
"""

from __future__ import annotations

import pytest

from farprop.errors import CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, RankLostError
from farprop.protocol.collective_consistency import CollectiveConsistency


def test_equal_fingerprints_pass_in_any_order():
    ours = CollectiveConsistency(0, 3)
    assert ours.begin("a") == 1
    ours.on_fingerprint(1, 1, "a")
    ours.on_fingerprint(2, 2, "b")  # rank 2 is ahead
    assert ours.begin("b") == 2
    ours.on_fingerprint(1, 2, "b")
    ours.on_fingerprint(2, 1, "a")  # a late one
    assert ours.failure is None
    ours.validate()


@pytest.mark.parametrize("when", ["before", "after", "much later"])
def test_different_fingerprints_fail_the_group(when):
    ours = CollectiveConsistency(0, 3)
    if when == "before":
        ours.on_fingerprint(2, 1, "b")
        with pytest.raises(CollectiveMismatchError):
            ours.begin("a")
    else:
        ours.begin("a")
        if when == "much later":
            ours.begin("c")
        ours.on_fingerprint(2, 1, "b")
    assert "Rank 0 called a, and rank 2 called b, as collective 1" in str(ours.failure)
    assert not ours.is_announced
    with pytest.raises(CollectiveMismatchError):
        ours.begin("d")
    ours.validate()


def test_old_fingerprints_are_forgotten():
    ours = CollectiveConsistency(0, 2)
    for _ in range(1000):
        ours.begin("a")
    ours.validate()
    ours.on_fingerprint(1, 1, "b")
    assert ours.failure is None


def test_timeout_names_the_ranks_that_did_not_arrive():
    ours = CollectiveConsistency(0, 4)
    ours.begin("a")
    ours.on_timeout([1], 2.0)
    assert isinstance(ours.failure, CollectiveTimeoutError)
    assert "in a, collective 1 of the group, after a timeout of 2 s: it waited for rank 1." in str(ours.failure)
    ours = CollectiveConsistency(0, 4)
    ours.begin("a")
    ours.on_fingerprint(1, 1, "a")  # it arrived, so it waits for another rank
    ours.on_timeout([1], 2.0)
    assert "it waited for ranks 2, 3." in str(ours.failure)
    ours = CollectiveConsistency(0, 2)
    ours.begin("a")
    ours.on_fingerprint(1, 1, "a")
    ours.on_timeout([1], 2.0)
    assert "it waited for rank 1." in str(ours.failure)


def test_rank_that_left_fails_only_collectives_that_wait_for_it():
    ours = CollectiveConsistency(0, 3)
    ours.begin("a")
    ours.on_peer_left(1, "", "")
    ours.on_peer_lost(1, "its connection has closed")
    assert ours.wait_error([2]) is None
    assert isinstance(ours.wait_error([1, 2]), RankLostError)
    # In a reduce to rank 2, rank 1 has sent its part and left. Our part is still to be sent.
    assert ours.begin("b") == 2
    assert ours.wait_error([2]) is None
    assert "Rank 1 has left the group" in str(ours.wait_error([1]))


def test_who_leaves_a_broken_group_says_why():
    """Rank 0 broke the group, rank 1 leaves because of that, and rank 3 hears rank 1 first."""
    ours = CollectiveConsistency(3, 4)
    ours.begin("a")
    ours.on_peer_left(1, "CollectiveError", "Rank 0 gave up: its disk is full")
    assert str(ours.wait_error([0, 1])) == "Rank 0 gave up: its disk is full"
    assert ours.is_announced
    ours.on_peer_failure(0, "CollectiveError", "its disk is full")
    assert str(ours.failure) == "Rank 0 gave up: its disk is full"


def test_first_failure_is_kept():
    ours = CollectiveConsistency(0, 3)
    ours.begin("a")
    ours.on_peer_lost(1, "its connection has closed")
    ours.on_peer_failure(2, "CollectiveMismatchError", "something else")
    assert "lost rank 1" in str(ours.failure)


def test_lost_rank_reported_by_a_peer_is_a_rank_lost_error():
    ours, theirs = CollectiveConsistency(0, 3), CollectiveConsistency(2, 3)
    ours.begin("a")
    ours.on_peer_lost(1, "its host does not answer any more")
    assert not ours.is_announced  # rank 2 may still reach it
    theirs.on_peer_failure(0, type(ours.failure).__name__, str(ours.failure))
    assert isinstance(theirs.failure, RankLostError)
    assert "Rank 0 has lost rank 1" in str(theirs.failure)
    # A rank that sends to the lost one may notice first, in the middle of a collective.
    ours = CollectiveConsistency(0, 3)
    ours.begin("a")
    ours.fail_local(RankLostError("Rank 0 can't reach rank 1: it is gone."))
    assert isinstance(ours.failure, RankLostError)


def test_rank_may_run_ahead_up_to_a_limit():
    ours = CollectiveConsistency(0, 3)
    ours.begin("a")
    for number in range(2, 50_000):
        for _ in range(3):  # it sends several parts, each with the fingerprint
            ours.on_fingerprint(1, number, "a")
    assert ours.failure is None
    for _ in range(2, 50_000):
        ours.begin("a")
    ours.validate()
    assert not ours._early_bytes[1]
    for number in range(50_000, 150_000):
        ours.on_fingerprint(1, number, "a" * 4096)
    assert type(ours.failure) is CollectiveError
    assert "Rank 1 is at collective" in str(ours.failure)
    assert "rank 0 still at 49999" in str(ours.failure)
    assert not ours._early
    assert not ours.is_announced  # so the others are told
    ours.on_fingerprint(2, 60_000, "a")
    assert not ours._early


def test_rank_that_sends_two_fingerprints_for_one_collective_fails():
    ours = CollectiveConsistency(0, 3)
    ours.begin("a")
    ours.on_fingerprint(1, 7, "a")
    ours.on_fingerprint(1, 7, "b")
    assert "Rank 1 called a, and also b, as collective 7" in str(ours.failure)
