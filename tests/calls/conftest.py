"""Every test of calls runs over Unix sockets with shared memory and over TCP alone.

``pytest.mark.one_transport`` is for tests that are about one of the two, or choose theirs.
"""

from __future__ import annotations

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    one = metafunc.definition.get_closest_marker("one_transport")
    metafunc.parametrize("transport", ["auto"] if one else ["auto", "tcp"], indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Workers have the environment of the test."""
    monkeypatch.setenv("FARPROP_TRANSPORT", request.param)
    return str(request.param)


@pytest.fixture
def env(transport: str) -> dict[str, str]:
    return {"FARPROP_TRANSPORT": transport}
