"""A few scenarios with fixed seeds, and whether the checks find what they are for; ``make chaos`` runs many more."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farprop.errors import CollectiveError, ConnectionLostError, OverloadedError, RendezvousError, RpcTimeoutError
from tests.chaos.faults import Event, draw_events, errors_of, join_errors_of
from tests.chaos.flood import check_memory, check_turns
from tests.chaos.jobs import JOBS, Findings
from tests.chaos.operations import Operation, Operations, Outcome
from tests.chaos.report import as_json, table
from tests.chaos.scenario import PAIRS, Report, check_operations, check_pushes, run_scenario
from tests.chaos.site import missing_faults
from tests.support.relay import Way

_GRACE = 5.0
_ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("fault", "job", "seed"),
    [
        ("kill", "server", 4),
        ("stop", "pipeline", 1),
        ("restart", "actors", 2),
        ("cut", "server", 44),
        ("disk", "actors", 7),
    ],
)
def test_scenario(fault: str, job: str, seed: int) -> None:
    missing = missing_faults(has_clocks=False)
    if fault in missing:
        pytest.skip(missing[fault])
    report = run_scenario(fault, job, seed, _GRACE)
    assert report.operations
    assert not report.violations, "\n".join([*report.violations, report.output, f"To try it again: {report.command}"])


def test_seed_decides_the_schedule() -> None:
    for fault, job in PAIRS:
        size = JOBS[job][1]
        first, again = (draw_events(fault, size, 4.0, random.Random(7)) for _ in range(2))
        assert first == again
        assert bool(first) == (fault != "none")
        assert all(event.rank in range(size) and event.at < 4.0 for event in first)


def test_short_cuts_and_few_losses_explain_timeouts_alone() -> None:
    cut = Event("cut", 1.0, 0, 0.5)
    lossy = Event("lossy", 1.0, 0, link={"loss": 0.001})
    assert errors_of([cut, lossy, Event("clock", 1.0, 0), Event("disk", 1.0, 0)]) == (RpcTimeoutError,)
    for harmful in (replace(cut, seconds=0.6), replace(lossy, link={"loss": 0.1}), Event("interrupt", 1.0, 0)):
        assert set(errors_of([harmful])) >= {ConnectionLostError, CollectiveError}
    assert errors_of([]) == join_errors_of([cut, Event("disk", 1.0, 0)]) == ()
    assert RendezvousError in join_errors_of([Event("disk", 0.0, 0)])


# Cables


def _arrivals(way: Way, frames: int = 1000) -> list[list[float]]:
    dice = random.Random(5)
    return [way.arrivals(float(number), 100, dice) for number in range(frames)]


def test_a_way_loses_doubles_and_delays_by_chance() -> None:
    assert _arrivals(Way()) == [[float(number)] for number in range(1000)]
    assert _arrivals(Way(loss=1.0)) == [[]] * 1000
    assert _arrivals(Way(double=1.0, delay=0.5)) == [[number + 0.5] * 2 for number in range(1000)]
    assert 50 < sum(not times for times in _arrivals(Way(loss=0.1))) < 150
    assert 50 < sum(times[0] > number for number, times in enumerate(_arrivals(Way(reorder=0.1)))) < 150
    assert _arrivals(Way(loss=0.1, reorder=0.1)) == _arrivals(Way(loss=0.1, reorder=0.1))


def test_a_way_has_a_rate_and_a_queue() -> None:
    way = Way(rate=1000.0, queue=0.25)
    dice = random.Random(5)
    times = [way.arrivals(0.0, 100, dice) for _ in range(5)]
    assert times == [[pytest.approx(0.1)], [pytest.approx(0.2)], [pytest.approx(0.3)], [], []]
    assert way.arrivals(0.2, 100, dice) == [pytest.approx(0.4)]


# The checks


def _raise(error: BaseException) -> Any:
    raise error


@pytest.mark.parametrize(
    ("operation", "outcome"),
    [
        (lambda left: 7, Outcome.VALUE),
        (lambda left: 8, Outcome.WRONG),
        (lambda left: _raise(ConnectionLostError("lost")), Outcome.ERROR),
        (lambda left: _raise(OverloadedError("full")), Outcome.UNEXPECTED),
        (lambda left: _raise(KeyError("no")), Outcome.UNEXPECTED),
        (lambda left: _raise(KeyboardInterrupt()), Outcome.INTERRUPTED),
    ],
)
def test_outcome(operation: Any, outcome: Outcome) -> None:
    operations = Operations(0, (ConnectionLostError,))
    result = operations.run("call", 5.0, operation, lambda value: value == 7)
    assert [one.outcome for one in operations.done] == [outcome]
    assert result.right == (outcome is Outcome.VALUE)


_CALL = Operation(1, "call", began=10.0, ended=12.0, deadline=2.0, outcome=Outcome.VALUE)


@pytest.mark.parametrize(
    ("operation", "stops", "says"),
    [
        (_CALL, [], ""),
        (replace(_CALL, ended=13.4), [], ""),
        (replace(_CALL, ended=13.6), [], "1.60 s after its deadline"),
        (replace(_CALL, ended=13.6), [(1, 9.0, 11.0)], ""),
        (replace(_CALL, ended=13.6), [(0, 9.0, 11.0)], "1.60 s after its deadline"),
        (replace(_CALL, ended=13.6), [(1, 13.5, 20.0)], ""),
        (replace(_CALL, outcome=Outcome.WRONG), [], "wrong value"),
        (replace(_CALL, outcome=Outcome.UNEXPECTED, error="KeyError"), [], "unexpected error KeyError"),
        (replace(_CALL, outcome=Outcome.ERROR, error="RpcTimeoutError"), [], ""),
    ],
)
def test_violations_of_operations(operation: Operation, stops: Any, says: str) -> None:
    report = Report("stop", "server", 0, [operation])
    check_operations(report, stops, grace=0.5)
    assert len(report.violations) == bool(says)
    assert says in "".join(report.violations)


@pytest.mark.parametrize(
    ("applied", "acknowledged", "refused", "says"),
    [
        ([(5, 1), (5, 2)], [(5, 1)], [], ""),
        ([(5, 1)], [(5, 1), (5, 2)], [], "acknowledged and not applied"),
        ([(5, 1), (5, 2)], [(5, 1)], [(5, 2)], "say that they did not run"),
    ],
)
def test_violations_of_pushes(applied: Any, acknowledged: Any, refused: Any, says: str) -> None:
    server = Findings([], server=9, applied=applied)
    trainer = Findings([], server=5, acknowledged={9: acknowledged, 8: [(5, 7)]}, refused=refused)
    problems = check_pushes([server, trainer])
    assert len(problems) == bool(says)
    assert says in "".join(problems)


def test_violations_of_floods() -> None:
    flood = [number / 1000 for number in range(10_000)]
    assert check_turns([], flood) == []
    assert check_turns([(0.5, 0.6), (2.0, 3.0)], flood) == []
    assert check_turns([(0.5, 0.6), (2.0, 6.0)], flood) == ["a call waited for 4000 calls of a flood"]
    assert check_memory(1, 5 << 20, 5 << 20) == []
    assert check_memory(1, 9 << 20, 5 << 20) == ["rank 1 needed 9 MiB more during a flood; 5 MiB are right"]


def test_table_and_json() -> None:
    lost = replace(_CALL, outcome=Outcome.ERROR, error="ConnectionLostError")
    good = Report("kill", "ddp", 3, [_CALL, lost], slowest=0.25, detected=[0.1, 0.3, 0.2])
    bad = Report("stop", "actors", 4, [_CALL], violations=["wrong"])
    lines = table([good, bad]).splitlines()
    assert " ".join(lines[1].split()) == "kill 1 2 1 1 ConnectionLostError 0.25 s 0.20 s, worst 0.30 s (3) 0"
    assert lines[-1] == "violations: 1, replay: python -m tests.chaos --seed 4 --only stop/actors --count 1"
    found = json.loads(as_json([good, bad]))
    assert [row["operations"] for row in found["faults"]] == [2, 1, 3]
    assert [violation["seed"] for violation in found["violations"]] == [4]


def test_page_names_tests_that_exist() -> None:
    page = (_ROOT / "docs/reliability.md").read_text()
    paths = set(re.findall(r"`(tests/[\w/.]+)`", page))
    assert paths
    assert [path for path in sorted(paths) if not (_ROOT / path).exists()] == []
    sources = "".join(path.read_text() for path in (_ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", page))
    assert names
    assert [name for name in sorted(names) if f"def {name}(" not in sources] == []
