"""The world of the programs of reinforcement learning."""

from __future__ import annotations

import torch


class World:
    """A point that two forces push along a line; it is rewarded for staying in the middle."""

    def __init__(self, seed: int) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._state = torch.zeros(2)

    def reset(self) -> torch.Tensor:
        self._state = torch.randn(2, generator=self._random) * 0.5
        return self._state

    def step(self, action: int) -> tuple[torch.Tensor, float]:
        place, speed = self._state.tolist()
        speed += 0.1 * (2 * action - 1) - 0.05 * place
        place += 0.1 * speed
        self._state = torch.tensor([place, speed])
        return self._state, 1.0 - min(1.0, abs(place))
