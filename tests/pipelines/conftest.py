"""Most tests of pipelines share one job of four workers. After each test nothing of it may be left."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from farprop.nn.stage_runner import _runners
from farprop.runtime.agent_registry import current_agent
from tests.references.looking import counts, wait_until
from tests.support.workers import Cluster, cluster

SIZE = 4


@pytest.fixture(scope="package")
def _shared() -> Iterator[Cluster]:
    with cluster(SIZE) as job:
        yield job


@pytest.fixture
def workers(_shared: Cluster) -> Iterator[Cluster]:
    """Workers 0 to 3. After the test none of them has a reference, an autograd context, or stages of a pipeline."""
    yield _shared
    for function in (gc.collect, _become_empty):
        for rank in range(SIZE):
            _shared.run(rank, function)


def _become_empty() -> None:
    wait_until(lambda: not any(counts().values()), "no references left")
    wait_until(lambda: not len(current_agent().gradients.contexts), "no contexts left")
    wait_until(lambda: not len(_runners), "no stages left")
