"""Every test of calls runs over Unix sockets with shared memory and over TCP alone, which has TLS.

``pytest.mark.one_transport`` is for tests that are about one of the two, or choose theirs. Those with
``pytest.mark.without_tls_too`` run a third time, over TCP with FARPROP_TLS=0.
"""

from __future__ import annotations

import pytest

_PLAIN_TCP = "tcp without TLS"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marked = metafunc.definition.get_closest_marker
    transports = ["auto"] if marked("one_transport") else ["auto", "tcp"]
    if marked("without_tls_too"):
        transports.append(_PLAIN_TCP)
    metafunc.parametrize("transport", transports, indirect=True)


@pytest.fixture(autouse=True)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Workers have the environment of the test."""
    if request.param == _PLAIN_TCP:
        monkeypatch.setenv("FARPROP_TLS", "0")
    chosen = "tcp" if request.param == _PLAIN_TCP else str(request.param)
    monkeypatch.setenv("FARPROP_TRANSPORT", chosen)
    return chosen


@pytest.fixture
def env(transport: str) -> dict[str, str]:
    return {"FARPROP_TRANSPORT": transport}
