"""`make clients`: our programs run on farprop, in a small size, and differences are detected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.clients import __main__ as command
from bench.clients.comparison import Comparison, difference, exit_code, markdown
from bench.clients.running import Run, read, run
from bench.driver import BenchError


@pytest.mark.parametrize("program", command.OURS)
def test_program_written_for_torch_runs_on_farprop(program: str) -> None:
    result = run(program, "farprop", sys.executable, limit=100, tiny=True)
    assert result.failure == ""
    assert result.values
    assert 0 < result.seconds < result.whole_seconds


def _outcome(torch: list[Run], farprop: list[Run]) -> Comparison:
    outcome = Comparison("program")
    outcome.runs = {"torch": torch, "farprop": farprop}
    return outcome


GOOD = Run("", 2.0, 5.0, {"losses": [1.0, 0.5]})
FAST = Run("", 1.0, 4.0, {"losses": [1.0, 0.50001]})


def test_results_within_the_tolerance_are_equal() -> None:
    outcome = _outcome([GOOD, GOOD], [FAST, FAST])
    assert outcome.row() == ["program", "2.00", "1.00", "0.50", "5.0", "4.0", "same"]
    assert exit_code([outcome]) == 0


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"losses": [1.0, 0.6]}, "losses[1]: 0.5 and 0.6"),
        ({"losses": [1.0]}, "losses: 2 and 1 values"),
        ({"loss": 1.0}, "result: ['losses'] and ['loss']"),
        (None, "result: {'losses': [1.0, 0.5]} and None"),
    ],
)
def test_difference_in_any_round_is_an_error(values: object, text: str) -> None:
    outcome = _outcome([GOOD, GOOD], [FAST, Run("", 1.0, 4.0, values)])
    assert outcome.verdict == f"differs on farprop: {text}"
    assert exit_code([_outcome([GOOD], [FAST]), outcome]) == 1


def test_program_that_torch_does_not_reproduce_is_no_error() -> None:
    outcome = _outcome([GOOD, Run("", 1.0, 4.0, {"losses": [1.0, 0.6]})], [FAST, FAST])
    assert outcome.verdict == "differs on torch: losses[1]: 0.5 and 0.6"
    assert exit_code([outcome]) == 0


def test_numbers_that_are_not_finite_differ() -> None:
    assert difference(1.0, float("nan"))
    assert difference(float("nan"), float("nan"))
    assert difference(2, 3) == "result: 2 and 3"


def test_program_that_fails_only_on_farprop_is_an_error() -> None:
    bad = Run("ValueError: no")
    assert exit_code([_outcome([GOOD, GOOD], [FAST, bad])]) == 1
    assert exit_code([_outcome([GOOD, bad], [FAST, FAST])]) == 0
    both = _outcome([bad], [bad])
    assert exit_code([both]) == 0
    assert both.verdict == "torch failed 1 of 1: ValueError: no; farprop failed 1 of 1: ValueError: no"


def test_outcome_of_a_run() -> None:
    assert read(None, "", "", 30, 30).failure == "hangs (ended after 30 s)"
    assert read(0, "", "", 30, 1).failure == "exit code 0, without a result"
    errors = (
        "warning\nTraceback (most recent call last):\n  File\nValueError: first\nTraceback (most recent call last):\nB"
    )
    assert read(1, 'RESULT {"seconds": 1, "values": 2}', errors, 30, 1).failure == "ValueError: first"
    assert read(0, 'hello\nRESULT {"seconds": 1.5, "values": [2]}\n', "", 30, 4.0) == Run("", 1.5, 4.0, [2])


def test_hanging_program_is_killed() -> None:
    result = run("parameter_server", "torch", sys.executable, limit=0.01)
    assert result.failure == "hangs (ended after 0.01 s)"


def test_unavailable_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(venv: Path, packages: list[str]) -> Path:
        raise BenchError(f"can't be installed: no {packages[-1]}")

    monkeypatch.setattr(command.venvs, "python_with", nothing)
    outcome = command.compare("pyg_features", 3, 1.0)
    assert outcome.verdict == "left out: can't be installed: no torch_geometric==2.8.1"
    assert "| pyg_features |  |  |  |  |  | left out: can't be installed: no torch_geometric==2.8.1 |" in markdown(
        [outcome]
    )
    assert exit_code([outcome]) == 0
