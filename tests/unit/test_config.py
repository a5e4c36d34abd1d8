"""Settings from the environment."""

from __future__ import annotations

import pytest

from farprop.config import Settings
from farprop.errors import UsageError


def test_settings_are_read_from_the_environment() -> None:
    read = Settings.from_env({"FARPROP_PORT_RANGE": "5000-5010", "FARPROP_INSECURE": "1", "FARPROP_TRANSPORT": "tcp"})
    assert (read.port_range, read.insecure, read.transport) == ((5000, 5010), True, "tcp")
    assert Settings.from_env({"FARPROP_PORT_RANGE": "5000", "FARPROP_INSECURE": "0"}).port_range == (5000, 5000)
    assert Settings.from_env({}) == Settings()
    invalid = (
        ("PORT_RANGE", "9-1"),
        ("SHM_POOL_BYTES", "-1"),
        ("TRANSPORT", "x"),
        ("WHEN_FULL", "x"),
        ("ON_FAILURE", "x"),
    )
    for bad in ({f"FARPROP_{name}": value} for name, value in invalid):
        with pytest.raises(UsageError, match="FARPROP_"):
            Settings.from_env(bad)


@pytest.mark.parametrize("text", ["-1", "fast", "1000001", "1.5"])
def test_spin_microseconds(text: str) -> None:
    assert Settings.from_env({"FARPROP_SPIN_MICROSECONDS": "0"}).spin_microseconds == 0
    assert Settings.from_env({"FARPROP_SPIN_MICROSECONDS": "500"}).spin_microseconds == 500
    with pytest.raises(UsageError, match="FARPROP_SPIN_MICROSECONDS"):
        Settings.from_env({"FARPROP_SPIN_MICROSECONDS": text})
