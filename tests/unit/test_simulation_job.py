"""Whole simulated jobs keep farprop's promises, and the simulator detects planted bugs. ``make sim`` runs more.

It replaces clocks, threads and sockets for a whole process, so it has one of its own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation.harness import MUTANTS
from tests.simulation.job.killers import KILLERS
from tests.simulation.job.mutants import SHARED
from tests.simulation.runner import mutants_of

ROOT = Path(__file__).parents[2]
SEEDS = 300
LIMIT = 3000  # seeds within which a mutant has to be killed; some need rare coincidences


def _simulate(*arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--kind", "job", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    return ran.stdout


def test_no_seed_fails_and_all_parts_take_part() -> None:
    text = _simulate("--seeds", str(SEEDS), "--jobs", "2")
    assert f"{SEEDS} seeds" in text
    for what in ("runs", "failed calls", "passes", "failed passes", "collectives", "failed collectives", "returns"):
        found = re.search(rf"([\d,]+) {what}", text)
        assert found is not None, what
        assert int(found[1].replace(",", "")) > 0, what


def test_seed_is_replayed_alike() -> None:
    assert _simulate("--seed", "11") == _simulate("--seed", "11")


@pytest.mark.timeout(600)  # seconds, unless the runtime has changed and seeds must be searched for
def test_mutants_are_killed() -> None:
    text = _simulate("--mutants", "--likely", "--seeds", str(LIMIT), "--jobs", "2")
    names = re.findall(r"^\| `([^`]+)` \| \d+ \|", text, re.MULTILINE)
    assert set(names) == mutants_of("job").keys() | set(SHARED) == KILLERS.keys()
    assert len(names) >= 20


def test_mutants_say_what_is_wrong_with_them() -> None:
    for name, mutant in mutants_of("job").items():
        function = mutant.replacement.fget if isinstance(mutant.replacement, property) else mutant.replacement
        assert function.__doc__, name
    assert all(name in MUTANTS for name in SHARED)
