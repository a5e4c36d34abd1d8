"""What a program will be like."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.autograd.oracle.local import LocalPlace
from tests.autograd.oracle.program import Block, Leaf


@dataclass
class Plan:
    """What all blocks of a program share while it is made."""

    rng: random.Random
    workers: int
    is_exact: bool
    is_tidy: bool  # everything is used, as FAST needs it
    hook_rate: float
    call_rate: float
    budget: int
    has_big: bool
    has_none: bool
    places: list[LocalPlace] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    hooks: int = 0

    def hook(self, kinds: tuple[str, ...]) -> tuple[int, str, int]:
        self.hooks += 1
        return self.hooks, self.rng.choice(kinds), self.rng.choice((0, 0, 2, -1))
