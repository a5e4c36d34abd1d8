"""Tests of distributed autograd share one job of three workers; after each, no worker has a context left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.autograd.functions import no_contexts_left
from tests.support.workers import Cluster, cluster


@pytest.fixture(scope="package")
def _shared() -> Iterator[Cluster]:
    with cluster(3) as job:
        yield job


@pytest.fixture
def workers(_shared: Cluster) -> Iterator[Cluster]:
    """Workers 0, 1 and 2, without anything left from earlier tests."""
    yield _shared
    for rank in range(3):
        _shared.run(rank, no_contexts_left)
