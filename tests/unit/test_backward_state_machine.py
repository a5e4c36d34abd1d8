"""The state machine of a backward pass, one event at a time. The simulator tests many of them together."""

from __future__ import annotations

import pytest

from farprop.protocol.backward import (
    ALL,
    ALONE,
    ROOTS,
    WHOLE,
    Announcer,
    BackwardStateMachine,
    Credit,
    CreditShare,
    Ended,
    GiveBack,
    PassAction,
    Release,
    Run,
    Send,
    Series,
    Stuck,
    Survey,
    Target,
    Unit,
    UnknownSource,
)

HALF = Credit(1, 1)


def _machine(own_rank: int, *units: tuple[set[int], list[Target]], fast: bool = False) -> BackwardStateMachine:
    made = [Unit(frozenset(sources), tuple(targets)) for sources, targets in units]
    return BackwardStateMachine(own_rank, 0, fast, made, frozenset().union(*(unit.sources for unit in made)))


def _run(actions: list[PassAction]) -> Run:
    (action,) = actions
    assert isinstance(action, Run)
    return action


def test_pass_without_targets_ends() -> None:
    machine = _machine(0, ({ROOTS}, []))
    assert machine.on_ran(_run(machine.on_gradient(ROOTS, ALL))) == [Ended()]
    assert machine.ended
    machine.validate()


def test_run_splits_its_credit_over_its_targets() -> None:
    machine = _machine(0, ({ROOTS}, [Target(1, 5), Target(2, 6)]))
    first, second = machine.on_ran(_run(machine.on_gradient(ROOTS, ALL)))
    assert first == Send(Target(1, 5), CreditShare(HALF, {}))
    assert second == Send(Target(2, 6), CreditShare(HALF, {}))
    assert machine.on_credit(CreditShare(HALF, {})) == []
    assert machine.on_credit(CreditShare(HALF, {})) == [Ended()]


def test_a_shared_unit_waits_for_all_of_its_sources() -> None:
    machine = _machine(1, ({5}, []), ({6}, []), ({5, 6}, [Target(0, 9)]))
    first = _run(machine.on_gradient(5, CreditShare(HALF, {})))
    assert first.units == (0,)
    (back,) = machine.on_ran(first)
    assert back == GiveBack(CreditShare(HALF, {1: (1, True)}))
    second = _run(machine.on_gradient(6, CreditShare(HALF, {})))
    assert second.units == (1, 2)
    assert machine.on_ran(second) == [Send(Target(0, 9), CreditShare(HALF, {1: (2, False)}))]
    machine.validate()


def test_one_run_at_a_time() -> None:
    machine = _machine(1, ({5}, []), ({6}, []))
    first = _run(machine.on_gradient(5, CreditShare(HALF, {})))
    assert machine.on_gradient(6, CreditShare(HALF, {})) == []
    machine.validate()
    back, second = machine.on_ran(first)
    assert isinstance(back, GiveBack)
    assert second == Run(6, (1,), CreditShare(HALF, {}))


def test_workers_that_block_after_a_release_are_released_too() -> None:
    """Gradients that follow from the release of one worker may block another."""
    origin = _machine(0, ({ROOTS}, [Target(1, 5)]))
    (sent,) = origin.on_ran(_run(origin.on_gradient(ROOTS, ALL)))
    assert isinstance(sent, Send)
    first = _machine(1, ({5}, []), ({6}, []), ({5, 6}, [Target(2, 7)]))
    (back,) = first.on_ran(_run(first.on_gradient(5, sent.share)))
    assert isinstance(back, GiveBack)
    assert origin.on_credit(back.share) == [Survey()]
    (on_release,) = origin.on_surveyed({1: frozenset({5}), 2: frozenset({7})})
    assert on_release == Release(1, frozenset({5}), CreditShare(WHOLE, {}))
    (passed,) = first.on_ran(_run(first.on_release(on_release.used, on_release.share)))
    assert isinstance(passed, Send)
    second = _machine(2, ({7}, []), ({8}, []), ({7, 8}, []))
    (back,) = second.on_ran(_run(second.on_gradient(7, passed.share)))
    assert isinstance(back, GiveBack)
    (on_release,) = origin.on_credit(back.share)
    assert on_release == Release(2, frozenset({7}), CreditShare(WHOLE, {}))
    last = _run(second.on_release(on_release.used, on_release.share))
    assert last.units == (2,)
    (back,) = second.on_ran(last)
    assert isinstance(back, GiveBack)
    assert origin.on_credit(back.share) == [Ended()]
    for machine in (origin, first, second):
        machine.validate()


def test_release_does_not_run_units_without_an_arrived_source() -> None:
    machine = _machine(1, ({5}, []), ({6}, []), ({7}, []), ({5, 6}, []), ({6, 7}, [Target(0, 9)]))
    machine.on_ran(_run(machine.on_gradient(5, CreditShare(HALF, {}))))
    assert _run(machine.on_release([5], CreditShare(HALF, {}))) == Run(None, (3,), CreditShare(HALF, {}))


def test_fast_pass_waits_for_every_send() -> None:
    origin = _machine(0, ({ROOTS}, []), ({4}, []), fast=True)
    assert origin.on_ran(_run(origin.on_gradient(ROOTS, ALL))) == [Stuck((0,))]
    assert origin.missing == {4}


def test_newest_status_counts_even_if_an_older_one_arrives_last() -> None:
    origin = _machine(0, ({ROOTS}, [Target(1, 5), Target(1, 6)]))
    origin.on_ran(_run(origin.on_gradient(ROOTS, ALL)))
    assert origin.on_credit(CreditShare(HALF, {1: (2, False)})) == []
    assert origin.on_credit(CreditShare(HALF, {1: (1, True)})) == [Ended()]


def test_no_actions_after_a_failure() -> None:
    machine = _machine(0, ({ROOTS}, [Target(1, 5)]), ({4}, []))
    run = _run(machine.on_gradient(ROOTS, ALL))
    assert machine.fail()
    assert not machine.fail()
    assert machine.on_ran(run) == []
    assert machine.on_gradient(4, CreditShare(HALF, {})) == []
    assert machine.on_release([], CreditShare(HALF, {})) == []
    assert machine.on_credit(CreditShare(WHOLE, {})) == []
    assert machine.on_surveyed({}) == []
    assert not machine.active


def test_ended_pass_cannot_fail() -> None:
    machine = _machine(0, ({ROOTS}, []))
    machine.on_ran(_run(machine.on_gradient(ROOTS, ALL)))
    assert not machine.fail()
    assert not machine.failed
    machine.validate()


def test_unexpected_gradients_raise() -> None:
    machine = _machine(1, ({5}, []))
    with pytest.raises(UnknownSource):
        machine.on_gradient(6, CreditShare(HALF, {}))
    machine.on_gradient(5, CreditShare(HALF, {}))
    with pytest.raises(UnknownSource):
        machine.on_gradient(5, CreditShare(HALF, {}))
    machine.validate()


# Series, and credit that is kept

QUARTER = CreditShare(Credit(1, 2), {})


def _handle(
    machine: BackwardStateMachine, series: Series, share: CreditShare = QUARTER
) -> tuple[bool, list[PassAction]]:
    """Whether the credit of a message is kept, and what is returned when it is handled."""
    machine.on_message(series)
    kept = machine.keep(share)
    machine.validate()
    actions = machine.on_handled()
    machine.validate()
    return kept, actions


def test_credit_of_a_series_returns_at_once() -> None:
    machine = _machine(1, ({5}, []))
    assert _handle(machine, Series(2, False), CreditShare(Credit(1, 2), {3: (1, True)})) == (True, [])
    assert machine.active
    assert _handle(machine, Series(0, True)) == (True, [])
    assert _handle(machine, Series(0, True)) == (True, [GiveBack(CreditShare(Credit(3, 2), {3: (1, True)}))])
    assert not machine.active


def test_series_may_be_handled_in_any_order() -> None:
    machine = _machine(1, ({5}, []))
    assert _handle(machine, Series(0, True)) == (False, [])
    assert _handle(machine, Series(2, False)) == (True, [])
    assert _handle(machine, Series(0, True)) == (True, [GiveBack(CreditShare(Credit(2, 2), {}))])
    assert _handle(machine, Series(0, True)) == (False, [])  # of another series, whose first message is late
    assert _handle(machine, Series(1, False)) == (True, [GiveBack(QUARTER)])


def test_credit_waits_for_other_messages_that_are_handled_now() -> None:
    machine = _machine(1, ({5}, []))
    machine.on_message(ALONE)
    assert _handle(machine, ALONE) == (True, [])
    assert machine.on_handled() == [GiveBack(QUARTER)]


def test_a_failed_pass_returns_no_credit() -> None:
    machine = _machine(1, ({5}, []))
    _handle(machine, Series(1, False))
    machine.fail()
    machine.on_message(Series(0, True))
    assert machine.on_handled() == []


def test_an_announcer_announces_once_and_marks_one_message_of_each_source() -> None:
    several = [Target(1, 5), Target(1, 6), Target(2, 7)], [Target(1, 8)], None, [Target(1, 9)]
    announcer = Announcer(several)
    announcer.begin(several[0])
    assert [announcer.next(worker) for worker in (1, 1, 2, 3)] == [Series(2, False), ALONE, ALONE, ALONE]
    announcer.begin(())
    assert announcer.next(1) == ALONE
    for targets in (several[1], several[3]):
        announcer.begin(targets)
        assert [announcer.next(1), announcer.next(1)] == [Series(0, True), ALONE]


def test_sources_run_together_if_they_lead_to_nobody_else() -> None:
    units: list[tuple[set[int], list[Target]]] = [({5}, []), ({6}, [Target(2, 9)]), ({7}, [Target(3, 1)])]
    machine = _machine(1, *units)
    assert machine.start_together([5, 7], 2) is None
    assert machine.start_together([5, 5], 2) is None
    assert machine.start_together([5, 8], 2) is None
    assert machine.start_together([5, 6], 2) == [(), (Target(2, 9),)]
    assert machine.start_together([5, 6], 2) is None
    machine.validate()
    shared = _machine(1, ({5}, []), ({6}, []), ({5, 6}, []))
    assert shared.start_together([5, 6], 2) is None


def test_no_short_cut_after_a_failure() -> None:
    machine = _machine(1, ({5}, []), ({6}, []))
    machine.fail()
    assert machine.start_unshared(5) is None
    assert machine.start_together([5, 6], 0) is None
