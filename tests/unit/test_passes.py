"""The machine of a backward pass, one event at a time. What many of them do together is in the simulator's tests."""

from __future__ import annotations

import pytest

from farprop.errors import ProtocolError
from farprop.protocol.credit import NONE, WHOLE, Credit
from farprop.protocol.pass_messages import PassHead, pack_head, unpack_head
from farprop.protocol.passes import (
    ALL,
    ROOTS,
    Action,
    Ended,
    GiveBack,
    GradientPass,
    PassId,
    Release,
    Run,
    Send,
    Share,
    Stuck,
    Survey,
    Target,
    Unit,
    UnknownSource,
)

HALF = Credit(1, 1)
BLANK = PassHead(*[False] * len(PassHead._fields))


def _machine(me: int, *units: tuple[set[int], list[Target]], fast: bool = False) -> GradientPass:
    made = [Unit(frozenset(sources), tuple(targets)) for sources, targets in units]
    return GradientPass(me, 0, fast, made, frozenset().union(*(unit.sources for unit in made)))


def _run(actions: list[Action]) -> Run:
    (action,) = actions
    assert isinstance(action, Run)
    return action


def test_a_pass_that_leads_nowhere_ends() -> None:
    machine = _machine(0, ({ROOTS}, []))
    assert machine.ran(_run(machine.come(ROOTS, ALL))) == [Ended()]
    assert machine.ended
    machine.validate()


def test_what_a_run_leads_to_is_sent_with_shares_of_its_credit() -> None:
    machine = _machine(0, ({ROOTS}, [Target(1, 5), Target(2, 6)]))
    first, second = machine.ran(_run(machine.come(ROOTS, ALL)))
    assert first == Send(Target(1, 5), Share(HALF, {}))
    assert second == Send(Target(2, 6), Share(HALF, {}))
    assert machine.returned(Share(HALF, {})) == []
    assert machine.returned(Share(HALF, {})) == [Ended()]


def test_a_shared_unit_waits_for_all_of_its_sources() -> None:
    machine = _machine(1, ({5}, []), ({6}, []), ({5, 6}, [Target(0, 9)]))
    first = _run(machine.come(5, Share(HALF, {})))
    assert first.units == (0,)
    (back,) = machine.ran(first)
    assert back == GiveBack(Share(HALF, {1: (1, True)}))
    second = _run(machine.come(6, Share(HALF, {})))
    assert second.units == (1, 2)
    assert machine.ran(second) == [Send(Target(0, 9), Share(HALF, {1: (2, False)}))]
    machine.validate()


def test_one_thing_runs_at_a_time() -> None:
    machine = _machine(1, ({5}, []), ({6}, []))
    first = _run(machine.come(5, Share(HALF, {})))
    assert machine.come(6, Share(HALF, {})) == []
    machine.validate()
    back, second = machine.ran(first)
    assert isinstance(back, GiveBack)
    assert second == Run(6, (1,), Share(HALF, {}))


def test_those_who_are_blocked_after_a_release_are_released_too() -> None:
    """A worker may become blocked by what the release of another one leads to."""
    origin = _machine(0, ({ROOTS}, [Target(1, 5)]))
    (sent,) = origin.ran(_run(origin.come(ROOTS, ALL)))
    assert isinstance(sent, Send)
    first = _machine(1, ({5}, []), ({6}, []), ({5, 6}, [Target(2, 7)]))
    (back,) = first.ran(_run(first.come(5, sent.share)))
    assert isinstance(back, GiveBack)
    assert origin.returned(back.share) == [Survey()]
    (release,) = origin.surveyed({1: frozenset({5}), 2: frozenset({7})})
    assert release == Release(1, frozenset({5}), Share(WHOLE, {}))
    (passed,) = first.ran(_run(first.release(release.used, release.share)))
    assert isinstance(passed, Send)
    second = _machine(2, ({7}, []), ({8}, []), ({7, 8}, []))
    (back,) = second.ran(_run(second.come(7, passed.share)))
    assert isinstance(back, GiveBack)
    (release,) = origin.returned(back.share)
    assert release == Release(2, frozenset({7}), Share(WHOLE, {}))
    last = _run(second.release(release.used, release.share))
    assert last.units == (2,)
    (back,) = second.ran(last)
    assert isinstance(back, GiveBack)
    assert origin.returned(back.share) == [Ended()]
    for machine in (origin, first, second):
        machine.validate()


def test_what_nothing_leads_to_is_not_run_by_a_release() -> None:
    machine = _machine(1, ({5}, []), ({6}, []), ({7}, []), ({5, 6}, []), ({6, 7}, [Target(0, 9)]))
    machine.ran(_run(machine.come(5, Share(HALF, {}))))
    assert _run(machine.release([5], Share(HALF, {}))) == Run(None, (3,), Share(HALF, {}))


def test_a_fast_pass_waits_for_every_send() -> None:
    origin = _machine(0, ({ROOTS}, []), ({4}, []), fast=True)
    assert origin.ran(_run(origin.come(ROOTS, ALL))) == [Stuck((0,))]
    assert origin.missing == {4}


def test_the_newest_status_counts_whatever_comes_last() -> None:
    origin = _machine(0, ({ROOTS}, [Target(1, 5), Target(1, 6)]))
    origin.ran(_run(origin.come(ROOTS, ALL)))
    assert origin.returned(Share(HALF, {1: (2, False)})) == []
    assert origin.returned(Share(HALF, {1: (1, True)})) == [Ended()]


def test_after_a_failure_nothing_is_wanted() -> None:
    machine = _machine(0, ({ROOTS}, [Target(1, 5)]), ({4}, []))
    run = _run(machine.come(ROOTS, ALL))
    assert machine.fail()
    assert not machine.fail()
    assert machine.ran(run) == []
    assert machine.come(4, Share(HALF, {})) == []
    assert machine.release([], Share(HALF, {})) == []
    assert machine.returned(Share(WHOLE, {})) == []
    assert machine.surveyed({}) == []
    assert not machine.active


def test_a_pass_that_has_ended_does_not_fail() -> None:
    machine = _machine(0, ({ROOTS}, []))
    machine.ran(_run(machine.come(ROOTS, ALL)))
    assert not machine.fail()
    assert not machine.failed
    machine.validate()


def test_gradients_that_nobody_waits_for() -> None:
    machine = _machine(1, ({5}, []))
    with pytest.raises(UnknownSource):
        machine.come(6, Share(HALF, {}))
    machine.come(5, Share(HALF, {}))
    with pytest.raises(UnknownSource):
        machine.come(5, Share(HALF, {}))
    machine.validate()


@pytest.mark.parametrize(
    "share", [Share(NONE, {}), Share(WHOLE, {}), Share(Credit(3, 700).split(3)[2], {1: (1, True), 65535: (7, False)})]
)
def test_heads_travel(share: Share) -> None:
    blank = PassHead(*[False] * len(PassHead._fields))
    head = blank._replace(
        context_id=1 << 50, pair=(1 << 63) + 3, pass_id=PassId(3, 9), oldest=8, fast=True, share=share
    )
    assert unpack_head(pack_head(head)) == head


def test_a_head_that_is_cut_off() -> None:
    for statuses in ({}, {1: (1, True)}):
        data = pack_head(BLANK._replace(pass_id=PassId(1, 1), share=Share(HALF, statuses)))
        for broken in (b"", data[:10], data[:-1], data + b"x"):
            with pytest.raises(ProtocolError):
                unpack_head(broken)
