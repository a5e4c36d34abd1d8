"""Every test of calls runs over Unix sockets with shared memory and over TCP alone."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["auto", "tcp"])
def env(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"FARPROP_TRANSPORT": request.param}
