"""Most tests of optimizers share one job, because torch imports modules for seconds when the first one is made."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from farprop.runtime.agent_registry import current_agent
from tests.references.looking import counts, wait_until
from tests.support.workers import Cluster, cluster


@pytest.fixture(scope="package")
def _shared() -> Iterator[Cluster]:
    with cluster(3) as job:
        yield job


@pytest.fixture
def workers(_shared: Cluster) -> Iterator[Cluster]:
    """Workers 0, 1 and 2. After the test there must be no reference and no autograd context on any of them."""
    yield _shared
    for function in (gc.collect, _become_empty):
        for rank in range(3):
            _shared.run(rank, function)


def _become_empty() -> None:
    wait_until(lambda: not any(counts().values()), "no references left")
    wait_until(lambda: not len(current_agent().gradients.contexts), "no contexts left")
