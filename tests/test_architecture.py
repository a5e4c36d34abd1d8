"""The walks of docs/architecture.md are those of real calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import walks
from tests.support.workers import Cluster, cluster


@pytest.fixture(scope="module")
def job() -> Iterator[Cluster]:
    with cluster(2) as workers:
        yield workers


@pytest.mark.parametrize("side", walks.SIDES)
@pytest.mark.parametrize("name", walks.WALKS)
def test_walk_enters_the_modules_that_the_page_shows(job: Cluster, name: str, side: str) -> None:
    seen = [walks.modules(walk) for walk in walks.walk(job, name, side)]
    shown = walks.shown_modules(walks.PAGE.read_text(), name, side)
    assert shown in seen, f"run python -m tests.walks; the shortest walk is now {seen[0]}"
