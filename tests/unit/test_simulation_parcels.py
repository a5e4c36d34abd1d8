"""Simulated parcels reach all who live, each call runs once, and the simulator detects planted bugs."""

from __future__ import annotations

import pytest

from tests.simulation.parcels.world import run
from tests.simulation.runner import Report, first_kill, mutants_of, replay, run_all

SEEDS = 1500
# Seeds that kill mutants which need many.
_LIKELY = {"reports-before-shares-are-confirmed": 1165}


def test_no_seed_fails() -> None:
    report = Report("parcels")
    for outcome in run_all(range(SEEDS), jobs=1, mutant=None, kind="parcels"):
        assert outcome.failure is None, replay(outcome, None)
        report.add(outcome)
    for name in report.kind.faults:
        assert report.counts[name] >= 50, name


@pytest.mark.parametrize("mutant", mutants_of("parcels"))
def test_every_mutant_is_killed(mutant: str) -> None:
    found = first_kill(mutant, 2000, _LIKELY.get(mutant))
    assert found is not None, f"2000 seeds, and nothing wrong with {mutant}"
    assert run(found.seed).failure is None, "without the mutant, nothing is wrong with that seed"
