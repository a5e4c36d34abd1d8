"""Functions that the tests of autograd call on other workers."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import Any

import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.runtime.autograd.contexts import current_context
from tests.references.looking import wait_until

parameter = torch.full((2, 2), 3.0, requires_grad=True)
kept: dict[str, Any] = {}
gates: dict[str, threading.Event] = {}


def no_contexts_left() -> None:
    """Wait until this worker has no context and no pass."""
    wait_until(lambda: autograd._get_debug_info() == {"num_current_backward_passes": 0, "num_autograd_contexts": 0})


def info() -> dict[str, str]:
    return autograd._get_debug_info()


def context_exists(context_id: int) -> bool:
    try:
        autograd._retrieve_context(context_id)
    except RuntimeError:
        return False
    return True


def times_parameter(x: torch.Tensor) -> torch.Tensor:
    return x * parameter


def gradient_of_parameter(context_id: int) -> torch.Tensor | None:
    return autograd.get_gradients(context_id).get(parameter)


def grad_of_parameter() -> torch.Tensor | None:
    return parameter.grad


def double_along(path: list[str], x: torch.Tensor) -> torch.Tensor:
    """Call worker after worker along the path, and double the tensor on each."""
    if not path:
        return x * 2
    return rpc.rpc_sync(path[0], double_along, args=(path[1:], x)) * 2  # type: ignore[no-any-return]


class Raising(torch.autograd.Function):
    """Raises in its backward pass while ``error`` is set."""

    error: str | None = "no gradient today"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Raising.error is not None:
            raise ValueError(Raising.error)
        return gradient


def set_error(error: str | None) -> None:
    Raising.error = error


def raising_later(x: torch.Tensor) -> torch.Tensor:
    """The gradient of the parameter here is computed before the error is raised."""
    return Raising.apply(x) * parameter  # type: ignore[no-any-return,no-untyped-call]


class AtGate(torch.autograd.Function):
    """Waits in its backward pass until its gate is opened; the gate ``death`` ends the process."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: str) -> torch.Tensor:
        ctx.gate = gate
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        kept[ctx.gate] = "reached"
        if ctx.gate == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        gates.setdefault(ctx.gate, threading.Event()).wait(60)
        return gradient, None


def at_gate(x: torch.Tensor, gate: str) -> torch.Tensor:
    return AtGate.apply(x, gate)  # type: ignore[no-any-return,no-untyped-call]


def at_gate_of(worker: str, x: torch.Tensor, gate: str) -> torch.Tensor:
    return rpc.rpc_sync(worker, at_gate, args=(x, gate))  # type: ignore[no-any-return]


def was_reached(gate: str) -> bool:
    return kept.get(gate) == "reached"


def open_gate(gate: str) -> None:
    kept.pop(gate, None)
    gates.setdefault(gate, threading.Event()).set()


@rpc.functions.async_execution
def later(worker: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return rpc.rpc_async(worker, times_parameter, args=(x,)).then(
        lambda f: rpc.rpc_sync(worker, torch.neg, (f.wait(),))
    )


async def coroutine(worker: str, x: torch.Tensor) -> torch.Tensor:
    return await rpc.rpc_async(worker, times_parameter, args=(x,)) + 1  # type: ignore[no-any-return]


def current_context_id() -> int:
    return autograd._current_context()._context_id()


def times_parameter_without_collector(x: torch.Tensor) -> torch.Tensor:
    """As ``times_parameter``; notes the context, and turns the garbage collector off until ``context_is_freed``."""
    gc.disable()
    kept["context"] = weakref.ref(current_context.get())
    return times_parameter(x)


def context_is_freed() -> None:
    """Wait until the noted context is gone, with its graph and gradients."""
    try:
        wait_until(lambda: kept["context"]() is None)
    finally:
        gc.enable()
