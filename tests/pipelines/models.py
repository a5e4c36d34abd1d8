"""Models in stages, for the tests of pipelines, and what they do in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import farprop.autograd as dist_autograd
from farprop.rpc import RRef

WIDTH = 5


def layers(count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(count)]


def batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    x, y = torch.randn(2, samples, WIDTH, dtype=torch.float64)
    return x, y


def alone(modules: Sequence[nn.Module], x: torch.Tensor, y: torch.Tensor, loss_fn: Any) -> torch.Tensor:
    """The loss in this process. The gradients are in the modules."""
    loss = loss_fn(nn.Sequential(*modules)(x), y)
    loss.backward()
    return loss.detach()


def gradient(context_id: int, parameter: RRef[Any]) -> torch.Tensor | None:
    return dist_autograd.get_gradients(context_id).get(parameter.local_value())


def gradients(context_id: int, parameters: Sequence[RRef[Any]]) -> list[torch.Tensor | None]:
    """Those of a context, wherever the parameters are."""
    import farprop.rpc as rpc

    return [rpc.rpc_sync(p.owner(), gradient, (context_id, p)) for p in parameters]
