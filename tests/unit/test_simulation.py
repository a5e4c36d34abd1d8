"""Simulated jobs keep the protocol's invariants, and the simulator detects planted bugs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from farprop.protocol.references.records import USER_TABLE, User, UserEvent
from tests import diagram
from tests.simulation.harness import Outcome, Violation, mutated
from tests.simulation.runner import Report, first_kill, mutants_of, replay, run_all
from tests.simulation.world import World, run

ROOT = Path(__file__).parents[2]
SEEDS = 300
LIMIT = 2000  # seeds within which a mutant has to be killed
# Seeds that kill mutants which need many. If the simulator changes, they are searched for.
LIKELY = {"lent-and-not-awaited": 992, "lent-and-found-too-early": 992, "borrowed-beyond-a-break": 198}
MUTANTS = mutants_of("references")


def test_no_seed_fails() -> None:
    failed = [replay(outcome, None) for outcome in run_all(range(SEEDS), jobs=1, mutant=None) if outcome.failure]
    assert failed == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_every_mutant_is_killed(mutant: str) -> None:
    found = first_kill(mutant, LIMIT, LIKELY.get(mutant))
    assert found is not None, f"{LIMIT} seeds, and nothing wrong with {MUTANTS[mutant].replacement.__doc__}"
    healthy = run(found.seed)
    assert healthy.failure is None, "without the mutant, nothing is wrong with that seed"


def test_mutant_is_removed_afterwards() -> None:
    mutant = MUTANTS["children-not-held"]
    before = getattr(mutant.owner, mutant.method)
    with pytest.raises(ZeroDivisionError), mutated("children-not-held"):
        assert getattr(mutant.owner, mutant.method) is mutant.replacement
        raise ZeroDivisionError
    assert getattr(mutant.owner, mutant.method) is before


def test_runs_cover_all_messages_and_faults() -> None:
    report = Report()
    for outcome in run_all(range(100), jobs=1, mutant=None):
        report.add(outcome)
    counts = report.counts
    messages = ("calls", "answers", "returned", "batches", "replies")
    operations = ("REGISTER", "ACCEPT", "RETURN", "DELETE", "FORGO", "REVOKE", "RECALL")
    for name in messages + operations:
        assert counts[name] > 20, name
    for fault in ("lost messages", "doubled messages", "timeouts", "unsent messages", "broken connections"):
        assert 10 < report.runs_with[fault] < 100, fault
    for fault in ("interrupted sends", "partitions", "false deaths", "crashes"):
        assert 5 < report.runs_with[fault] < 100, fault
    assert {len(World(seed, tracing=False).workers) for seed in range(100)} == {2, 3, 4, 5}


def test_seed_determines_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Also in another process, where hash randomisation gives sets another order."""
    run(3, tracing=True)
    trace = capsys.readouterr().out
    assert len(trace.splitlines()) > 100
    run(3, tracing=True)
    assert capsys.readouterr().out == trace
    for hash_seed in ("1", "2"):
        done = _command("--seed", "3", PYTHONHASHSEED=hash_seed)
        assert done.returncode == 0
        assert done.stdout == trace + "all is well\n"


def test_failing_seed_prints_the_command_that_replays_it() -> None:
    done = _command("--seeds", "60", "--jobs", "2", "--mutant", "children-not-held")
    assert done.returncode == 1
    line = done.stdout.splitlines()[0]
    match = re.fullmatch(r"python -m tests\.simulation (--seed \d+ --mutant children-not-held)  # (.+)", line)
    assert match, line
    again = _command(*match[1].split())
    assert again.returncode == 1
    *trace, last = again.stdout.splitlines()
    assert last == match[2]
    assert any("drops reference" in event for event in trace)
    failed = sum(outcome.failure is not None for outcome in run_all(range(60), jobs=1, mutant="children-not-held"))
    assert re.search(rf"^60 seeds, [\d,]+ steps, \d+ s: {failed} failed$", done.stdout, re.MULTILINE)


def test_report_has_the_totals() -> None:
    report = Report()
    report.add(Outcome(1, None, Counter(steps=1000, calls=5, crashes=2)))
    report.add(Outcome(2, "something", Counter(steps=500, crashes=1, REVOKE=7)))
    report.add(Outcome(3, None, Counter(steps=1)))
    text = report.text(12.3)
    assert "3 seeds, 1,501 steps, 12 s: 1 failed" in text
    assert "5 calls" in text
    assert "7 REVOKE" in text
    assert re.search(r"crashes +3 +2\n?$", text)


def test_any_exception_of_a_run_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(world: World) -> None:
        raise KeyError("lost")

    monkeypatch.setattr(World, "run", fail)
    assert run(1).failure == "KeyError: 'lost'"
    monkeypatch.undo()
    monkeypatch.setattr("tests.simulation.checks.nothing_left", lambda world: (_ for _ in ()).throw(Violation("left")))
    assert run(1).failure == "Violation: left"


def test_docs_are_up_to_date() -> None:
    page = (ROOT / "docs" / "references.md").read_text()
    assert diagram.updated(page) == page, "run python -m tests.diagram"
    assert f"in {len(MUTANTS)} ways" in page


def test_diagrams_follow_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "references.md").read_text()
    monkeypatch.setitem(USER_TABLE, (User.VOID, UserEvent.REGISTERED), User.CONFIRMED)
    added = set(diagram.updated(page).splitlines()) - set(page.splitlines())
    assert added == {"    VOID --> CONFIRMED: REGISTERED"}
    with pytest.raises(ValueError, match="no place"):
        diagram.updated("a page without marks")


def _command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.simulation", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
