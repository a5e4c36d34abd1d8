"""Modules for the tests of DistributedDataParallel, and the expected results of one process."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Two branches of different depth, with a shared weight and one with unusual strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 6)
        self.other = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.randn(6, 3).t())
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.second(torch.tanh(self.first(x)))) + self.second(self.other(x))
        return (y @ self.scale.t()).pow(2)


class Unused(Net):
    """A layer that no rank uses, and one that only some ranks use."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(4, 4).double()
        self.sometimes = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        y = super().forward(x)
        return y + self.sometimes(x) if use else y


class Mixed(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.single = nn.Linear(4, 5)
        self.double_ = nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.double_(torch.tanh(self.single(x.float())).double()).pow(2)


class Words(nn.Module):
    """A sparse embedding under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(20, 4, sparse=True)
        self.dense = nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dense(self.embedding(x)).pow(2)


def batch(size: int, number: int = 0) -> torch.Tensor:
    """Two rows for each rank."""
    return torch.randn(2 * size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(7 + number))


def words(size: int, number: int = 0) -> torch.Tensor:
    return torch.randint(20, (2 * size,), generator=torch.Generator().manual_seed(7 + number))


def share(whole: torch.Tensor, rank: int) -> torch.Tensor:
    return whole[2 * rank : 2 * rank + 2]


def assert_gradients(module: nn.Module, right: nn.Module, tolerance: float = 1e-10) -> None:
    for (name, parameter), expected in zip(module.named_parameters(), right.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        actual, wanted = parameter.grad, expected.grad
        if wanted.is_sparse:
            assert actual.is_sparse, name
            actual, wanted = actual.to_dense(), wanted.to_dense()
        loose = parameter.dtype == torch.float32
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-6 if loose else tolerance, msg=name)


def step(module: nn.Module) -> None:
    """A step of gradient descent. Torch's optimizers import the compiler, which keeps the default group alive."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
