"""Functions and classes that the tests of references use on other workers."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import defaultdict
from typing import Any

import torch

import farprop.rpc as rpc
from tests.calls import functions as calls

# What a worker keeps between two calls of a test.
kept: dict[str, Any] = {}
gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
ran: list[Any] = []


def keep(key: str, value: Any) -> None:
    kept[key] = value


def let_go(key: str) -> None:
    kept.pop(key)


def kept_value(key: str) -> Any:
    """The value of a kept reference."""
    return kept[key].to_here()


def kept_state(key: str) -> str:
    return kept[key]._record.state.name  # type: ignore[no-any-return]


def give(key: str) -> Any:
    return kept[key]


def keep_some(owner: str, other: str) -> None:
    """Keep references to a thing, a number and a value that is never made, on ``owner``; pass on the second."""
    kept["value"] = rpc.remote(owner, Thing, args=("kept",))
    kept["number"] = rpc.remote(owner, calls.add, args=(1,))
    assert kept["number"].to_here() == 2
    kept["pending"] = rpc.remote(owner, at_gate, args=("never",))
    rpc.rpc_sync(other, keep, args=("passed", kept["number"]))


def open_gate(name: str) -> None:
    gates[name].set()


def at_gate(name: str, value: Any = None) -> Any:
    """Return the value when the gate is opened."""
    assert gates[name].wait(30), f"nobody opened {name}"
    return value


def note(value: Any) -> None:
    ran.append(value)


def noted() -> list[Any]:
    return list(ran)


def to_here(rref: Any) -> Any:
    return rref.to_here()


class Thing:
    """A value that can be watched, and can't be pickled."""

    alive: weakref.WeakSet[Thing] = weakref.WeakSet()

    def __init__(self, name: str = "thing", inner: Any = None) -> None:
        self.name = name
        self.inner = inner
        self.lock = threading.Lock()
        self.count = 0
        self.double = lambda x: 2 * x  # a callable that only the instance has
        Thing.alive.add(self)

    def plus(self, n: int, times: int = 1) -> int:
        self.count += n * times
        return self.count

    def set_inner(self, inner: Any) -> None:
        self.inner = inner

    def fail(self) -> None:
        raise KeyError(self.name)

    def at_gate(self, gate: str) -> str:
        at_gate(gate)
        return self.name

    async def soon(self, n: int) -> int:
        await asyncio.sleep(0)
        return self.count + n

    @rpc.functions.async_execution
    def later(self, gate: str) -> torch.futures.Future[str]:
        future: torch.futures.Future[str] = torch.futures.Future()

        def finish() -> None:
            at_gate(gate)
            future.set_result(self.name)

        threading.Thread(target=finish).start()
        return future

    @rpc.functions.async_execution
    def later_fails(self) -> torch.futures.Future[str]:
        future: torch.futures.Future[str] = torch.futures.Future()
        future.set_exception(KeyError("later"))
        return future

    @rpc.functions.async_execution
    def later_not_a_future(self) -> int:
        return 5

    def make(self, name: str) -> Thing:
        return Thing(name)

    def inner_says(self) -> list[str]:
        return [rref.owner_name() for rref in self.inner]

    def plus_locked(self, n: int) -> None:
        with self.lock:
            self.count += n


class Adder:
    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, other: int) -> int:
        return self.n + other


class Swallower:
    """A context manager that suppresses all exceptions."""

    def __init__(self) -> None:
        self.seen: Any = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: Any, error: Any, __: Any) -> bool:
        self.seen = error
        return True

    def swallowed(self) -> str:
        return repr(self.seen)


def things(name: str) -> int:
    """The number of things with this name on this worker."""
    return sum(thing.name == name for thing in list(Thing.alive))


def own(name: str) -> Any:
    """A reference to a thing on the worker that runs this function."""
    return rpc.RRef(Thing(name))


def gated_thing(gate: str, name: str) -> Thing:
    at_gate(gate)
    note(name)
    return Thing(name)


class Chain:
    """An object that holds a reference."""

    def __init__(self, rref: Any) -> None:
        self.rref = rref


class Failing:
    @rpc.functions.async_execution
    def later(self, name: str) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        error = ValueError("with a thing")
        error.thing = Thing(name)  # type: ignore[attr-defined]
        future.set_exception(error)
        return future


class Table(dict[int, Any]):
    """A value that changes while other threads read it."""

    def change(self, i: int) -> None:
        for j in range(50):
            self[1000 * i + j] = j
        for j in range(49):
            del self[1000 * i + j]
