"""What holds for tests on clusters."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """Not checked here: Ray keeps threads and files until this process ends."""
