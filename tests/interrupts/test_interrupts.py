"""A sample of the points; ``make interrupts`` tries all of them. Where the sample begins is drawn anew for each run."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.interrupts.programs import PROGRAMS
from tests.interrupts.sweep import Jobs, sweep, sweep_shutdown

_EVERY = 31
_EVERY_OF_SHUTDOWN = 97
_OFFSET = random.SystemRandom().randrange(1000)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with Jobs() as made:
        made.job()
        yield made


@pytest.mark.parametrize("name", PROGRAMS)
def test_interrupt_breaks_nothing_and_leaves_nothing(jobs: Jobs, name: str) -> None:
    result = sweep(jobs, name, _EVERY, _OFFSET)
    assert result.points > 1
    assert not result.failures, _replayed(result.failures, name, _EVERY)


def test_interrupted_shutdown_ends_on_both_sides() -> None:
    result = sweep_shutdown(_EVERY_OF_SHUTDOWN, _OFFSET)
    assert result.tried
    assert not result.failures, _replayed(result.failures, "shutdown", _EVERY_OF_SHUTDOWN)


def _replayed(failures: list[str], name: str, every: int) -> str:
    again = f"python -m tests.interrupts --every {every} --offset {_OFFSET} {name}"
    return "\n".join([*failures, f"To try it again: {again}"])
