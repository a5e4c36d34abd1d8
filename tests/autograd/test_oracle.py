"""Random programs on workers, compared with one process. ``python -m tests.autograd.oracle`` runs more."""

from __future__ import annotations

import pytest

from tests.autograd.oracle.__main__ import replay_line
from tests.autograd.oracle.driver import WORLD, Report, run_seeds, wait_until_all_empty
from tests.autograd.oracle.generator import generate
from tests.support.workers import cluster

_PROGRAMS = 100


@pytest.mark.one_transport
def test_random_programs_agree_with_one_process() -> None:
    total = Report()
    with cluster(WORLD, options={"rpc_timeout": 20}) as job:
        for report in run_seeds(job, range(_PROGRAMS)):
            total.add(report)
        wait_until_all_empty(job)
    lines = [f"{problem}\nreplay: {replay_line(seed, 'auto')}" for seed, problem in total.failures.items()]
    assert not lines, "\n".join(lines)
    assert total.programs == _PROGRAMS
    assert total.gradients > _PROGRAMS
    assert total.hook_calls > 0


def test_a_seed_gives_the_same_program_every_time() -> None:
    for seed in range(20):
        assert generate(seed)[0] == generate(seed)[0]
