"""What a program leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tests.autograd.oracle.hooks import Call


@dataclass
class Outcome:
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # by leaf
    retained: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by hook
    log: list[Call] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.gradients.update(other.gradients)
        self.retained.update(other.retained)
        self.log += other.log
        self.problems += other.problems
