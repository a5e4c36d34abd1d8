"""Functions and classes of workers in restricted jobs, exposed and not exposed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import farprop.rpc as rpc
from farprop.runtime.agent_registry import current_agent

CALLED: list[str] = []  # forbidden functions that ran on this worker


@rpc.expose
def add(left: Any, right: Any = 1) -> Any:
    return left + right


@rpc.expose(name="counted")
def count(to: int) -> Iterator[int]:
    yield from range(to)


def hidden_count(to: int) -> Iterator[int]:
    CALLED.append("hidden_count")
    yield from range(to)


@rpc.expose
def echo(*values: Any) -> Any:
    return values[0] if len(values) == 1 else values


@rpc.expose(name="times")
def multiply(left: Any, right: Any) -> Any:
    return left * right


@rpc.expose
@rpc.functions.async_execution
def add_later(left: Any, right: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(left + right)
    return future


@rpc.expose
async def add_in_a_coroutine(left: Any, right: Any) -> Any:
    await asyncio.sleep(0)
    return left + right


noted: list[str] = []


@rpc.expose
async def wait_until_cancelled() -> None:
    noted.append("begun")
    try:
        await asyncio.Event().wait()
    finally:
        noted.append("cancelled")


@rpc.expose
def last_note() -> str:
    return noted[-1] if noted else ""


@rpc.expose
def fail(kind: str) -> None:
    if kind == "value":
        raise ValueError("what was wrong")
    if kind == "key":
        raise KeyError("a key")
    if kind == "own":
        raise MyError("what was wrong")
    raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")


@rpc.expose
def object_of(kind: str) -> Any:
    return {"object": object(), "module": torch.nn.Linear(1, 1), "lambda": lambda: 1}[kind]


def hidden() -> str:
    CALLED.append("hidden")
    return "hidden"


def called() -> list[str]:
    return CALLED


WEIGHT = torch.ones(3, requires_grad=True)


@rpc.expose
def weigh(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


class MyError(Exception):
    pass


@rpc.expose
@dataclass(frozen=True)
class Point:
    x: int
    y: Any = None

    def __post_init__(self) -> None:
        if self.x == 13:
            raise ValueError("no 13")


@rpc.expose
@dataclass(frozen=True)
class CallablePoint:
    x: int
    y: int

    def __call__(self) -> Iterator[int]:
        CALLED.append("CallablePoint")
        yield self.x


@dataclass
class Unknown:
    x: int


@rpc.expose
class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    @rpc.expose
    def add(self, step: int) -> int:
        self.value += step
        return self.value

    @rpc.expose
    @rpc.functions.async_execution
    def add_later(self, step: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(self.add(step))
        return future

    def reset(self) -> None:
        CALLED.append("reset")
        self.value = 0

    @rpc.expose
    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    @rpc.expose
    @classmethod
    def named(cls, value: int) -> str:
        return f"{cls.__name__}{value}"


@rpc.expose
class Caller:
    """Not a module: calling it does not call its ``forward``."""

    @rpc.expose
    def forward(self) -> int:
        return 1

    def __call__(self) -> None:
        CALLED.append("__call__")


class Doubled(Counter):
    """A derived class: methods that its base class exposes are exposed here, too."""

    def add(self, step: int) -> int:
        return super().add(2 * step)


@rpc.expose
def make_doubled() -> rpc.RRef[Doubled]:
    return rpc.RRef(Doubled())


@rpc.expose
def value_behind(rref: rpc.RRef[Any]) -> Any:
    return rref.to_here()


@rpc.expose
def pass_on(rref: rpc.RRef[Any], to: str) -> Any:
    return rpc.rpc_sync(to, value_behind, (rref,))


rpc.expose(torch.mul)
rpc.expose(torch.optim.SGD)
rpc.expose(torch.optim.lr_scheduler.StepLR)
rpc.expose(torch.nn.Linear, methods=("forward", "parameters", "train"))


@rpc.expose
class Half(torch.nn.Module):
    """The half of a model that stays on its worker. Other workers can't read its parameters."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        torch.manual_seed(inputs)
        self.layer = torch.nn.Linear(inputs, outputs)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    @rpc.expose
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))

    @rpc.expose
    def parameter_rrefs(self) -> list[rpc.RRef[torch.nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]


@rpc.expose
def waiting_requests() -> int:
    """The number of the program's requests that run on this worker, including this one."""
    return int(current_agent()._server.active)
