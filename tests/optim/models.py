"""A model in three parts, in one process or on three workers, and helpers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.optim import DistributedOptimizer

Place = tuple[str, str, str]
PLACE: Place = ("worker1", "worker2", "worker0")


class Part:
    """Two parameters that depend only on the seed."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.rand(3, 3, dtype=torch.float64, generator=generator))
        self.b = nn.Parameter(torch.rand(3, dtype=torch.float64, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w + self.b)

    def parameters(self) -> list[nn.Parameter]:
        return [self.w, self.b]

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


class SparsePart(Part):
    """Rows of a table, whose gradient is sparse."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.w = nn.Parameter(torch.arange(30, dtype=torch.float64).reshape(10, 3) / (seed + 30))

    def forward(self, x: Tensor) -> Tensor:
        rows = nn.functional.embedding((x.detach() * 10).long().clamp(0, 9), self.w, sparse=True)
        return x + rows.sum((1, 2)).reshape(-1, 1) / 8

    def parameters(self) -> list[nn.Parameter]:
        return [self.w]


class LinearPart(Part):
    """Its gradients do not depend on its parameters, so contexts are independent."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.b


class Far:
    """The three parts on workers, and references to their parameters; adjacent ones are on different workers."""

    def __init__(self, place: Place = PLACE, kind: type[Part] = Part) -> None:
        self.parts = [rpc.remote(worker, kind, (seed,)) for seed, worker in enumerate(place)]
        lists = [part.rpc_sync().references() for part in self.parts]
        self.references = [reference for row in zip(*lists, strict=True) for reference in row]

    def loss(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part.rpc_sync().forward(x)
        return (x * x).sum()

    def values(self) -> list[Tensor]:
        return [reference.to_here().detach().clone() for reference in self.references]


class Near:
    """The same in this process."""

    def __init__(self, kind: type[Part] = Part) -> None:
        self.parts = [kind(seed) for seed in range(3)]
        self.parameters = [p for row in zip(*(part.parameters() for part in self.parts), strict=True) for p in row]

    def loss(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part.forward(x)
        return (x * x).sum()

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]


def inputs(count: int, start: int = 0) -> list[Tensor]:
    made = []
    for number in range(start, start + count):
        generator = torch.Generator().manual_seed(100 + number)
        made.append(torch.rand(4, 3, dtype=torch.float64, generator=generator))
    return made


def train_far(model: Far, optimizer: DistributedOptimizer, xs: Sequence[Tensor]) -> list[float]:
    losses = []
    for x in xs:
        with dist_autograd.context() as context_id:
            loss = model.loss(x)
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
    return losses


def train_near(model: Near, optimizer: torch.optim.Optimizer, xs: Sequence[Tensor]) -> list[float]:
    losses = []
    for x in xs:
        optimizer.zero_grad()
        loss = model.loss(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(first: Sequence[Tensor], second: Sequence[Tensor]) -> None:
    """Assert that the tensors are bitwise equal."""
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


def copy_values(values: Sequence[Tensor], references: Sequence[Any]) -> None:
    """Set the values of parameters on other workers."""
    for reference, value in zip(references, values, strict=True):
        rpc.rpc_sync(reference.owner(), _set, (reference, value))


def _set(reference: Any, value: Tensor) -> None:
    with torch.no_grad():
        reference.local_value().copy_(value)


def in_threads(count: int, function: Callable[[int], None]) -> None:
    """Run a function in several threads, and raise the error of one that failed."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            function(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Signs(torch.optim.Optimizer):
    """A user's optimizer: steps by the sign of an average of gradients."""

    def __init__(self, params: Any, lr: float, *, beta: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.mul_(group["beta"]).add_(parameter.grad)
                parameter.data = parameter.data - group["lr"] * average.sign()


class Nested(torch.optim.SGD):
    """A user's subclass, which makes parameter groups and calls its own worker in each step."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        groups = [
            {"params": [p for p in params if p.dim() == 1], "lr": lr / 2},
            {"params": [p for p in params if p.dim() != 1]},
        ]
        super().__init__([group for group in groups if group["params"]], lr=lr)

    def step(self, closure: Any = None) -> Any:
        me = rpc.get_worker_info().name
        assert rpc.rpc_sync(me, torch.add, (torch.ones(1), 1)).item() == 2
        return super().step(closure)
