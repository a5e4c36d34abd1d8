"""Simulated streams keep their invariants, and the simulator detects planted bugs."""

from __future__ import annotations

import pytest

from tests.simulation.runner import Report, mutants_of, replay, run_all
from tests.simulation.streams.world import run

SEEDS = 4000


def test_no_seed_fails() -> None:
    report = Report("streams")
    for outcome in run_all(range(SEEDS), jobs=1, mutant=None, kind="streams"):
        assert outcome.failure is None, replay(outcome, None)
        report.add(outcome)
    for name in (*report.kind.faults, *report.kind.lists["messages"]):
        assert report.counts[name] >= 100, name


@pytest.mark.parametrize("mutant", mutants_of("streams"))
def test_every_mutant_is_killed(mutant: str) -> None:
    found = next((outcome for outcome in run_all(range(2000), jobs=1, mutant=mutant) if outcome.failure), None)
    assert found is not None, f"2000 seeds, and nothing wrong with {mutant}"
    assert run(found.seed).failure is None, "without the mutant, nothing is wrong with that seed"
