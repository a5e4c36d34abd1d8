"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from farprop.dashboard import poller
from tests.dashboard.browser import browser


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look more often than once a second: tests wait for what is seen."""
    monkeypatch.setattr(poller, "INTERVAL_SECONDS", 0.25)


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started
