"""Simulated groups keep their promises, and the simulator notices when one does not."""

from __future__ import annotations

import pytest

from tests.simulation.groups.world import run
from tests.simulation.kinds import flaws_of
from tests.simulation.report import Report, replay, run_all

SEEDS = 4000


def test_healthy() -> None:
    report = Report("groups")
    for outcome in run_all(range(SEEDS), jobs=1, flaw=None, kind="groups"):
        assert outcome.failure is None, replay(outcome, None)
        report.add(outcome)
    for name in (*report.kind.faults, *report.kind.lists["words"]):
        assert report.counts[name] >= 100, name


@pytest.mark.parametrize("flaw", flaws_of("groups"))
def test_every_flaw_is_found(flaw: str) -> None:
    found = next((outcome for outcome in run_all(range(2000), jobs=1, flaw=flaw) if outcome.failure), None)
    assert found is not None, f"2000 seeds, and nothing wrong with {flaw}"
    assert run(found.seed).failure is None, "without the flaw, nothing is wrong with that seed"
