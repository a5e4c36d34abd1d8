"""What is made of the workers' answers: rates, bars, errors. No job, no clock."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from farprop.dashboard.picture import Picture
from farprop.dashboard.rates import Rates
from farprop.dashboard.task_stream import MOST_SLICES, RUN, WAIT, Slice, joined, slices_of, stream_part
from farprop.inspect.job import Job
from farprop.protocol import events
from farprop.protocol.call_stats import CLIENT, SERVER, CallStats
from farprop.protocol.events import MOST_MESSAGE, OK, ClientCall, Event, ServedCall, Span
from farprop.protocol.inspection import Member, Recent, Silence, Snapshot
from farprop.runtime.process_state import UNRESPONSIVE

_WALL = 1_000_000.0


def _member(name: str) -> Member:
    return Member(name, int(name[-1]), "host", 1, "net")


def _served(number: int, began: float, ended: float, outcome: str = OK, function: str = "m:f") -> ServedCall:
    return ServedCall("w0", number, function, 7, None, began, began, began, ended, ended, 100, 50, outcome)


def _made(number: int, began: float, ended: float, outcome: str = OK, kind: str = "rpc_sync") -> ClientCall:
    return ClientCall("w1", number, "m:f", kind, 3, None, None, began, began, began, ended, ended, 100, 50, outcome)


def _recent(
    name: str, now: float, events: list[Event], stats: CallStats, since: float = 0.0, missing: int = 0
) -> Recent:
    for event in events:
        stats.add(event)
    rows = [row.copy() for row in stats.rows()]
    return Recent(_member(name), now, _WALL + now, since, 0, missing, events, rows)


def _snapshot(name: str) -> Snapshot:
    return Snapshot(_member(name), "id", False, _WALL, 16, 1, False, [], [], 0)


def _job(*names: str) -> Job:
    return Job("id", {name: _snapshot(name) for name in names}, "train")


def test_rates_are_of_the_time_between_two_answers() -> None:
    rates, stats = Rates(), CallStats()
    rates.add(_recent("w1", 10.0, [_served(1, 1.0, 1.002)], stats))
    rates.add(_recent("w1", 12.0, [_served(n, 11.0, 11.004, "ValueError") for n in (2, 3, 4, 5)], stats))
    rate = rates.of_worker("w1", SERVER)
    assert rate is not None
    assert (rate.calls, rate.errors, rate.total) == (2.0, 2.0, 5)
    assert rate.received_bytes == 200.0
    assert rate.p50 == pytest.approx(0.004, rel=0.13)
    assert rates.of_worker("w0", SERVER) is None


def test_rates_of_a_worker_that_began_anew_are_not_negative() -> None:
    rates = Rates()
    rates.add(_recent("w1", 10.0, [_served(n, 1.0, 1.1) for n in range(50)], CallStats()))
    rates.add(_recent("w1", 30.0, [_served(99, 29.0, 29.5)], CallStats(), since=28.0))
    rate = rates.of_worker("w1", SERVER)
    assert rate is not None
    assert rate.calls == 0.5


def test_caller_is_believed_and_the_callee_if_the_caller_says_nothing() -> None:
    rates = Rates()
    rates.add(_recent("w1", 10.0, [_served(1, 1.0, 1.1)], CallStats()))
    assert rates.by_pair()["w0", "w1"].total == 1
    rates.add(_recent("w0", 10.0, [_made(1, 1.0, 1.1), _made(2, 1.0, 1.1)], CallStats()))
    assert rates.by_pair()["w0", "w1"].total == 2
    assert rates.by_function()["m:f"].total == 1
    assert rates.of_job().total == 2
    rates.keep(["w1"])
    assert rates.of_worker("w0", CLIENT) is None


def test_bars_are_on_the_clock_of_the_day_and_only_where_a_thread_was_busy() -> None:
    asynchronous = _made(2, 4.0, 5.0, kind="rpc_async")
    span, wait = Span("backward", "run", 7, 2.0, 3.0), Span(events.WAIT, "wait for gradients", 7, 6.0, 7.0)
    unfinished = ServedCall("w0", 3, "m:g", 7, None, 5.0, 5.0, 5.0, 6.0, 9.0, 0, 0, OK)
    bars = slices_of(
        _recent(
            "w1", 10.0, [_served(1, 1.0, 1.5), _made(1, 3.0, 4.0), asynchronous, span, wait, unfinished], CallStats()
        )
    )
    found = {(bar.kind, bar.name): (bar.start - _WALL, bar.end - _WALL) for bar in bars}
    assert found == {
        ("run", "m:f"): (1.0, 1.5),
        ("wait", "m:f"): (3.0, 4.0),
        ("span", "run"): (2.0, 3.0),
        ("wait", "wait for gradients"): (6.0, 7.0),
        ("run", "m:g"): (5.0, 6.0),  # it returned a future then
    }


def _bar(start: float, length: float, name: str = "f", thread: int = 1, kind: str = RUN) -> Slice:
    return Slice("w1", thread, name, kind, start, start + length, "w0", 1, length)


def test_short_bars_close_together_are_drawn_as_one() -> None:
    bars = [_bar(at * 0.0003, 0.00015) for at in range(100)]
    (one,) = joined(bars)
    assert one.count == 100
    assert one.busy == pytest.approx(0.015)
    apart = [_bar(0.0, 0.5), _bar(0.5, 0.5), _bar(0.0, 0.5, thread=2), _bar(0.0, 0.5, kind=WAIT)]
    assert len(joined(apart)) == 4  # long ones stay as they are


def test_there_are_never_too_many_bars() -> None:
    bars = [_bar(at * 1.0, 0.5, name=str(at)) for at in range(2 * MOST_SLICES)]
    found = joined(bars)
    assert len(found) == MOST_SLICES
    assert found[-1].name == str(2 * MOST_SLICES - 1)  # the newest stay


def test_part_of_the_stream_has_tables_of_names_and_lanes() -> None:
    part = stream_part([_recent("w1", 10.0, [_served(1, 1.0, 1.5)], CallStats(), missing=3)], {"w1": 7}, _WALL + 10.0)
    assert part.names == ["m:f"]
    assert part.lanes == [("w1", 7, "main")]
    assert part.slices == [(0, 0, "run", -9_000_000, 500_000, 500_000, 1, 0, "w0")]
    assert part.missing == 3


def test_error_that_both_ends_tell_of_is_one() -> None:
    picture = Picture()
    at_callee = _recent("w1", 10.0, [_served(1, 1.0, 1.5, "ValueError"), _served(2, 1.0, 1.5)], CallStats())
    at_caller = _recent("w0", 10.0, [_made(1, 1.0, 1.6, "ValueError")], CallStats())
    picture.look(_job("w0", "w1"), {"w1": at_callee}, _WALL)
    picture.look(_job("w0", "w1"), {"w0": at_caller}, _WALL + 1)
    assert picture.state is not None
    (error,) = picture.state.errors
    assert (error.type, error.caller, error.callee, error.count, error.time) == (
        "ValueError",
        "w0",
        "w1",
        1,
        _WALL + 1.5,
    )
    again = _recent("w1", 12.0, [_served(9, 11.0, 11.5, "ValueError")], CallStats())
    picture.look(_job("w0", "w1"), {"w1": again}, _WALL + 2)
    assert [row.count for row in picture.state.errors] == [2]


def _failed(message: str, number: int = 1) -> ServedCall:
    return msgspec.structs.replace(_served(number, 1.0, 1.5, "ValueError"), message=message)


def _message_of(picture: Picture, *told: Recent) -> str:
    for one in told:
        picture.look(_job("w0", "w1"), {one.name: one}, _WALL)
    assert picture.state is not None
    (row,) = picture.state.errors
    return row.message


def test_error_has_the_message_of_the_last_one() -> None:
    events: list[Event] = [_failed("bad batch 7"), _failed("bad batch 8", 2)]
    assert _message_of(Picture(), _recent("w1", 10.0, events, CallStats())) == "bad batch 8"


def test_end_of_a_call_that_tells_the_message_is_asked_if_the_other_does_not() -> None:
    """In a restricted job, workers of other hosts don't tell it."""
    discreet = _recent("w1", 10.0, [_served(1, 1.0, 1.5, "ValueError")], CallStats())
    open_hearted = msgspec.structs.replace(_made(1, 1.0, 1.6, "ValueError"), message="bad batch")
    assert _message_of(Picture(), discreet, _recent("w0", 10.0, [open_hearted], CallStats())) == "bad batch"
    known = _recent("w1", 10.0, [_failed("first")], CallStats())
    assert _message_of(Picture(), known, _recent("w0", 10.0, [open_hearted], CallStats())) == "first"


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("a\nb\tc", "a b c"),
        ("\x1b[2Jgone\x07\x00", "?[2Jgone??"),
        ("\u202egnp.exe\u200b\ufeff", "?gnp.exe??"),  # written from right to left, and nothing that is seen
        ("\ud800", "?"),  # no JSON
        ("<script>alert(1)</script>", "<script>alert(1)</script>"),  # the page shows it as text
        ("x" * 100_000, "x" * (MOST_MESSAGE - 1) + "…"),
        (" \n" * 100_000, ""),
    ],
)
def test_message_of_another_worker_is_a_short_line(message: str, shown: str) -> None:
    """A worker may say anything, whatever farprop would have it say."""
    assert _message_of(Picture(), _recent("w1", 10.0, [_failed(message)], CallStats())) == shown


def test_errors_have_a_limit() -> None:
    picture = Picture()
    events: list[Event] = [_served(n, 1.0, 1.5 + n, "ValueError", f"m:f{n}") for n in range(300)]
    picture.look(_job("w1"), {"w1": _recent("w1", 400.0, events, CallStats())}, _WALL)
    assert picture.state is not None
    assert [row.function for row in picture.state.errors] == [f"m:f{n}" for n in range(299, 199, -1)]


def test_worker_that_nobody_knows_any_more_keeps_its_card() -> None:
    picture = Picture()
    picture.look(_job("w0", "w1"), {}, _WALL)
    picture.look(_job("w0"), {}, _WALL + 1)
    assert picture.state is not None
    assert [(card.name, bool(card.silent)) for card in picture.state.workers] == [("w0", False), ("w1", True)]
    picture.look(_job("w0", "w1"), {}, _WALL + 2)  # it is back
    assert not any(card.silent for card in picture.state.workers)


def test_one_late_answer_does_not_empty_a_card() -> None:
    picture, stats = Picture(), CallStats()
    told = _recent("w1", 10.0, [_served(1, 1.0, 1.5)], stats)
    late = Silence(_member("w1"), "answers nothing")
    for answers, has_rates in (({"w1": told}, True), ({"w1": late}, True), ({"w1": late}, True), ({"w1": late}, False)):
        picture.look(_job("w1"), answers, _WALL)
        assert picture.state is not None
        assert (picture.state.workers[0].served is not None) == has_rates


def test_worker_is_silent_when_it_has_missed_several_looks_or_is_known_to_be_gone() -> None:
    def silent_after(reason: str) -> list[bool]:
        picture = Picture()
        picture.look(_job("w1"), {}, _WALL)
        found = []
        for _ in range(3):
            picture.look(Job("id", {"w1": Silence(_member("w1"), reason)}), {}, _WALL)
            assert picture.state is not None
            found.append(bool(picture.state.workers[0].silent))
        return found

    assert silent_after(f"answers nothing: {UNRESPONSIVE}") == [False, False, True]
    assert silent_after("can't be reached: it has ended") == [True, True, True]


def test_names_are_cut_where_they_are_absurd() -> None:
    picture = Picture()
    event = replace_function(_served(1, 1.0, 1.5, "ValueError"), "x" * 100_000)
    picture.look(_job("w1"), {"w1": _recent("w1", 10.0, [event], CallStats())}, _WALL)
    assert picture.state is not None
    assert len(picture.state.errors[0].function) < 1000
    assert len(picture.state.functions[0].function) < 1000


def replace_function(event: ServedCall, function: str) -> ServedCall:
    return _served(event.number, event.started, event.ended, event.outcome, function)


def test_end_keeps_what_was_seen_last() -> None:
    picture = Picture()
    picture.end()
    assert picture.state is None
    picture.look(_job("w0"), {}, _WALL)
    before = picture.state
    picture.end()
    assert before is not None
    assert picture.state == replace(before, ended=True)
