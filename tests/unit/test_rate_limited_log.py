"""Warnings that a peer can cause as often as it likes are rate-limited."""

from __future__ import annotations

import logging

import pytest

from farprop.runtime.rate_limited_log import RateLimitedLog


def test_flood_of_warnings_is_summarised(caplog: pytest.LogCaptureFixture) -> None:
    seconds = [0.0]
    log = RateLimitedLog(logging.getLogger("test"), lambda: seconds[0])
    for number in range(100_000):
        log.warning("refused %d", number)
    assert caplog.messages == [f"refused {number}" for number in range(5)]
    for _ in range(20):
        seconds[0] += 1
        log.warning("refused again")
    assert caplog.messages[5:] == [
        "refused again (100004 more like it since the last line)",
        "refused again (9 more like it since the last line)",
    ]


def test_limit_resets_after_a_pause(caplog: pytest.LogCaptureFixture) -> None:
    seconds = [0.0]
    log = RateLimitedLog(logging.getLogger("test"), lambda: seconds[0])
    for _ in range(7):
        log.warning("refused")
    seconds[0] = 20.0
    for _ in range(7):
        log.warning("refused")
    assert caplog.messages == [*["refused"] * 5, "refused (2 more like it since the last line)", *["refused"] * 4]
