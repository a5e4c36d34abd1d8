"""Functions that the tests call on other workers."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.runtime.agent_registry import current_agent


class Notes(list[Any]):
    """What functions have noted here, in order. A thread can wait for a note."""

    def __init__(self) -> None:
        self._changed = threading.Condition()

    def append(self, note: Any) -> None:
        with self._changed:
            super().append(note)
            self._changed.notify_all()

    def wait_for(self, note: Any) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: note in self, 30), self


ran = Notes()
gate = threading.Event()


def noop() -> None:
    return None


def identity(value: Any) -> Any:
    return value


def add(a: Any, b: Any = 1, *, c: Any = 0) -> Any:
    return a + b + c


def own_name() -> str:
    return rpc.get_worker_info().name


def own_pid() -> int:
    return os.getpid()


def note(value: Any) -> None:
    ran.append(value)


def noted() -> list[Any]:
    return list(ran)


def open_gate() -> None:
    gate.set()


def wait_for_gate() -> str:
    assert gate.wait(30)
    return "through"


def interrupt_and_wait_for_gate(pid: int) -> str:
    os.kill(pid, signal.SIGINT)
    return wait_for_gate()


def wait_for_gate_and_note(value: Any) -> None:
    assert gate.wait(30)
    ran.append(value)


def debug_info() -> dict[str, str]:
    return current_agent().get_debug_info()


def fill(tensor: torch.Tensor, value: float) -> None:
    tensor.fill_(value)


class Counter:
    total = 100

    def __init__(self, start: int) -> None:
        self.value = start

    def plus(self, n: int) -> int:
        return self.value + n

    @classmethod
    def of_class(cls, n: int) -> int:
        return cls.total + n

    @staticmethod
    def of_nobody(n: int) -> int:
        return -n


@rpc.functions.async_execution
def later(value: Any) -> torch.futures.Future[Any]:
    """Returns at once; done when the gate opens."""
    future: torch.futures.Future[Any] = torch.futures.Future()

    def finish() -> None:
        gate.wait(30)
        future.set_result(value)

    threading.Thread(target=finish, daemon=True).start()
    return future


@rpc.functions.async_execution
def later_not_a_future() -> int:
    return 5


async def coroutine(a: torch.Tensor) -> torch.Tensor:
    await asyncio.sleep(0)
    return a + 1


async def coroutine_at_gate(a: int) -> int:
    while not gate.is_set():
        await asyncio.sleep(0.001)
    return a


async def coroutine_that_raises() -> None:
    await asyncio.sleep(0)
    raise KeyError("from a coroutine")


def chain(depth: int, here: str, there: str, mode: str) -> int:
    """Each call makes the next one at the other worker."""
    if depth == 0:
        return 0
    if mode == "async":
        return 1 + int(rpc.rpc_async(there, chain, args=(depth - 1, there, here, mode)).wait())
    return 1 + int(rpc.rpc_sync(there, chain, args=(depth - 1, there, here, mode)))


def sleep(seconds: float) -> None:
    time.sleep(seconds)


class Custom(Exception):
    """An exception with two constructor arguments, which pickle finds in ``args``."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)
        self.code = code
        self.text = text


class Stubborn(Exception):
    """Can be pickled but not unpickled: its constructor refuses the pickled arguments."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def raise_value_error(text: str) -> None:
    raise ValueError(text)


def raise_custom() -> None:
    error = Custom(7, "seven")
    error.extra = [1, 2]  # type: ignore[attr-defined]
    raise error


def raise_stubborn() -> None:
    raise Stubborn(8, "eight")


def raise_unpicklable() -> None:
    error = ValueError("holds a lock")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    raise error


def raise_exit() -> None:
    raise SystemExit(3)


def raise_from(worker: str) -> None:
    rpc.rpc_sync(worker, raise_value_error, args=("two hops away",))


def unpicklable_result() -> Any:
    return threading.Lock()


def die() -> None:
    os._exit(9)


def die_soon() -> None:
    threading.Timer(0.2, os._exit, args=(9,)).start()


@torch.jit.script
def scripted_failure(message: str) -> torch.Tensor:
    raise ValueError(message)


@torch.jit.script
def scripted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a * b + 1


class ScriptedModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x

    @torch.jit.export
    def twice(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * 2


def gradient_through(worker: str) -> list[float]:
    """The gradient of a product that another worker has made."""
    weight = torch.ones(3, requires_grad=True)
    with autograd.context() as context:
        product = rpc.rpc_sync(worker, torch.mul, args=(weight, 2.0))
        autograd.backward(context, [product.sum()])
        return list(autograd.get_gradients(context)[weight].tolist())


async def coroutine_until_cancelled(value: Any) -> Any:
    """Notes that it begins, that it is cancelled, and that its clean-up could wait."""
    ran.append(("begins", value))
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.sleep(0)
        ran.append(("cancelled", value))
        raise


async def coroutine_that_ignores_cancels() -> torch.Tensor:
    ran.append("begins")
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        ran.append("goes on")
    return torch.zeros(1 << 20)


def wait_until_noted(value: Any) -> None:
    """Wait until a function has noted this value here."""
    ran.wait_for(value)


def served_state() -> tuple[int, int, int]:
    """Requests of others that are open here (but for this one), that are cancelled, and that can be stopped."""
    agent = current_agent()
    tables = [connection.served for connection in agent._accepted.all()]
    own = agent.peers.connections.get(agent.get_worker_info().name)
    if own is not None:
        tables.append(own._connection.served)
    for table in tables:
        table.validate()
    opened = sum(len(table.open) for table in tables) - 1
    return opened, sum(len(table.cancelled) for table in tables), sum(len(table._stops) for table in tables)
