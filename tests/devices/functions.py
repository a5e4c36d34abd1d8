"""Functions that the tests of device maps run on other workers."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.utils._pytree import tree_map

import farprop.rpc as rpc

ran: list[str] = []
finished = threading.Event()


def device(tensor: torch.Tensor) -> str:
    ran.append("device")
    return str(tensor.device)


def how_many_ran() -> int:
    return len(ran)


def devices(*args: Any, **kwargs: Any) -> Any:
    """The devices of tensors in containers."""
    return tree_map(lambda x: str(x.device) if isinstance(x, torch.Tensor) else x, (args, kwargs))


def about(tensor: torch.Tensor) -> tuple[str, bool, bool]:
    return str(tensor.device), tensor.requires_grad, tensor.is_leaf


def same(*args: Any) -> Any:
    return args[0] if len(args) == 1 else args


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def moved(tensor: torch.Tensor, to: str) -> torch.Tensor:
    return tensor.to(to)


def made_on(to: str) -> torch.Tensor:
    return torch.arange(3.0).to(to)


def pass_on(worker: str, tensor: torch.Tensor) -> torch.Tensor:
    """Double the tensor on another worker, and add it."""
    return rpc.rpc_sync(worker, double, (tensor,)) + tensor  # type: ignore[no-any-return]


def device_at(worker: str, here: str) -> tuple[str, str]:
    """The device on which a tensor from ``here`` arrives at the worker, and the one on which it comes back."""
    tensor = torch.ones(1).to(here)
    return rpc.rpc_sync(worker, device, (tensor,)), str(rpc.rpc_sync(worker, double, (tensor,)).device)


def finish() -> None:
    finished.set()


async def double_later(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


class Layer(torch.nn.Module):
    """A module with its weight on a device."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.weight = torch.full((3,), 2.0).to(where).requires_grad_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def run_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer.local_value()(x)  # type: ignore[no-any-return]


def gradient_of(layer: Any, context_id: int) -> tuple[str, list[float]]:
    import farprop.autograd as autograd

    gradient = autograd.get_gradients(context_id)[layer.local_value().weight]
    return str(gradient.device), gradient.cpu().tolist()
