"""Functions that are compiled on every worker, and called by compiled code."""

# TorchScript reads these annotations. They must not be strings, which it can't always resolve.
# ruff: noqa: UP006, UP035, UP045

from typing import Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

import farprop.jit  # noqa: F401
import farprop.rpc as rpc
from farprop.rpc import RRef


@torch.jit.script
def add(a: Tensor, b: Tensor) -> Tensor:
    return a + b


@torch.jit.script
def scaled(a: Tensor, factor: float = 2.0, name: str = "x") -> Tuple[Tensor, str]:
    return a * factor, name + "!"


@torch.jit.script
def nothing() -> None:
    return None


@torch.jit.script
def lists(count: int) -> Optional[Dict[str, List[Tensor]]]:
    if count < 0:
        return None
    found: Dict[str, List[Tensor]] = {}
    for index in range(count):
        found[str(index)] = [torch.ones(index)]
    return found


@torch.jit.script
def failing(message: str) -> Tensor:
    raise ValueError(message)


@torch.jit.script
def total(rref: RRef[Tensor], factor: int) -> Tensor:
    return rref.to_here().sum() * factor


@torch.jit.script
def numbers(count: int) -> List[int]:
    found: List[int] = []
    for index in range(count):
        found.append(index)
    return found


@torch.jit.script
def append(rref: rpc.RRef[List[int]], number: int) -> int:
    rref.local_value().append(number)
    return len(rref.to_here())


@torch.jit.script
def table() -> Dict[str, Tensor]:
    found: Dict[str, Tensor] = {}
    return found


@torch.jit.script
def put(rref: RRef[Dict[str, Tensor]], key: str, value: Tensor) -> None:
    rref.local_value()[key] = value


@rpc.functions.async_execution
@torch.jit.script
def add_elsewhere(to: str, a: Tensor, b: Tensor) -> torch.futures.Future[Tensor]:
    return rpc.rpc_async(to, add, (a, b))


@torch.jit.script
class Pair:
    def __init__(self, left: Tensor, right: int):
        self.left = left
        self.right = right

    def total(self) -> Tensor:
        return self.left + self.right


@torch.jit.script
def grown(pair: Pair) -> Pair:
    return Pair(pair.left * 2, pair.right + 1)


class Point(NamedTuple):
    x: Tensor
    y: int


@torch.jit.script
def moved(point: Point) -> Point:
    return Point(point.x + 1, point.y + 1)


@torch.jit.interface
class Layer(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[empty-body]
        pass


class Double(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


@torch.jit.ignore
def compiled_double() -> Layer:
    return torch.jit.script(Double())


@torch.jit.script
def make_layer() -> Layer:
    return compiled_double()


@torch.jit.script
def run_layer(layer: RRef[Layer], x: Tensor) -> Tensor:
    return layer.to_here().forward(x)


def uncompiled_neg(x: Tensor) -> Tensor:
    return -x
