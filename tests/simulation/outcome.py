"""What came of a run, of whatever kind."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple


class Outcome(NamedTuple):
    seed: int
    failure: str | None
    counts: Counter[str]
    kind: str = "references"
