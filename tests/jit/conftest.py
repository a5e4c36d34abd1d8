"""Tests of compiled code share one job of three workers, as those of distributed autograd do."""

from __future__ import annotations

from tests.autograd.conftest import _shared, workers

__all__ = ["_shared", "workers"]
