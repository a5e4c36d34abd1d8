"""Every test of references runs over Unix sockets with shared memory and over TCP alone, as those of calls do.

Most of them share one job of three workers for each transport (``workers``); after each test all tables of all workers
have to be empty. Those that kill, cut or shut down have jobs of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.references.looking import all_empty
from tests.support.workers import Cluster, cluster


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    one = metafunc.definition.get_closest_marker("one_transport")
    transports = ["auto"] if one else ["auto", "tcp"]
    if "workers" in metafunc.fixturenames:
        metafunc.parametrize("_shared", transports, indirect=True, scope="package")
    elif "transport" in metafunc.fixturenames:
        metafunc.parametrize("transport", transports, indirect=True)


@pytest.fixture(scope="package")
def _shared(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    with cluster(3, {"FARPROP_TRANSPORT": request.param}) as job:
        yield job


@pytest.fixture
def workers(_shared: Cluster) -> Iterator[Cluster]:
    """Workers 0, 1 and 2, without anything left from earlier tests."""
    yield _shared
    all_empty(_shared)


@pytest.fixture
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def env(transport: str) -> dict[str, str]:
    return {"FARPROP_TRANSPORT": transport}
