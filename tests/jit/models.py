"""A model whose middle part is on another worker, with calls and with operators."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import farprop.autograd as autograd
import farprop.jit
import farprop.rpc as rpc

_middle = torch.nn.Linear(8, 8)


def reset() -> None:
    """Parameters that are the same in each run."""
    _fill(_middle, 1)


def _fill(module: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)


def middle(x: Tensor) -> Tensor:
    return torch.tanh(_middle(x))


def middle_further_on(x: Tensor) -> Tensor:
    """Calls a third worker."""
    return rpc.rpc_sync("worker2", middle, args=(x * 2,)) + x


def step(context_id: int) -> None:
    gradients = autograd.get_gradients(context_id)
    with torch.no_grad():
        for parameter in _middle.parameters():
            parameter -= 0.1 * gradients[parameter]


class Ends(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        _fill(self, 2)


class Calling(Ends):
    """torch.compile breaks the graph at the call."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + rpc.rpc_sync("worker1", middle, args=(h,))
        return (self.last(h) ** 2).sum()


operator_of_middle = farprop.jit.operator(middle, torch.empty_like)
operator_further_on = farprop.jit.operator(middle_further_on, torch.empty_like)


class Operating(Ends):
    """The same with an operator, in one graph."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h + operator_of_middle("worker1", h)
        return (self.last(h) ** 2).sum()


def losses(model: Ends, run: Callable[[Tensor], Tensor]) -> list[float]:
    """Train the model for a few steps; ``run`` is the function to call, compiled or not."""
    rpc.rpc_sync("worker1", reset)
    x = torch.rand(16, 4, generator=torch.Generator().manual_seed(3))
    found = []
    for _ in range(5):
        with autograd.context() as context_id:
            loss = run(x)
            autograd.backward(context_id, [loss])
            found.append(loss.item())
            gradients = autograd.get_gradients(context_id)
            assert set(gradients) == set(model.parameters())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * gradients[parameter]
            rpc.rpc_sync("worker1", step, args=(context_id,))
    assert found[-1] < found[0]
    return found
