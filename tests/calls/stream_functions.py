"""Generators that the tests of streams iterate over on other workers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import farprop.rpc as rpc
from tests.calls import functions as f

gate = threading.Event()
produced: list[Any] = []
closed: list[Any] = []
kept: list[rpc.Stream[int]] = []  # streams that a test keeps open


def count(n: int, start: int = 0) -> Iterator[int]:
    yield from range(start, start + n)


async def count_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        await asyncio.sleep(0)
        yield i


def noting(name: str, n: int = 1_000_000) -> Iterator[int]:
    """Notes what it has produced, and that it was closed."""
    try:
        for i in range(n):
            produced.append((name, i))
            yield i
    finally:
        closed.append(name)


async def noting_async(name: str, n: int = 1_000_000) -> AsyncIterator[int]:
    try:
        for i in range(n):
            produced.append((name, i))
            yield i
    finally:
        closed.append(name)


async def never(name: str) -> AsyncIterator[int]:
    """Yields an item, and nothing more."""
    try:
        yield 0
        await asyncio.Event().wait()
    finally:
        closed.append(name)


def waiting_for_gate(name: str) -> Iterator[int]:
    try:
        yield 0
        assert gate.wait(30)
        yield 1
    finally:
        closed.append(name)


def slow_to_close(name: str) -> Iterator[int]:
    try:
        yield 0
        yield 1
    finally:
        produced.append((name, "is closing"))
        assert gate.wait(30)
        closed.append(name)


async def slow_to_close_async(name: str) -> AsyncIterator[int]:
    try:
        yield 0
        yield 1
    finally:
        produced.append((name, "is closing"))
        while not gate.is_set():
            await asyncio.sleep(0.001)
        closed.append(name)


def fails_to_close() -> Iterator[int]:
    try:
        yield 0
        yield 1
    finally:
        raise ZeroDivisionError


async def fails_to_close_async() -> AsyncIterator[int]:
    try:
        yield 0
        yield 1
    finally:
        raise ZeroDivisionError


def open_gate() -> None:
    gate.set()


def is_closed(name: str) -> bool:
    return name in closed


def all_closed() -> list[Any]:
    return list(closed)


def produced_by(name: str) -> int:
    return sum(who == name for who, _ in produced)


def tensors(n: int, size: int) -> Iterator[torch.Tensor]:
    for i in range(n):
        yield torch.full((size,), float(i))


def reused(n: int, size: int) -> Iterator[Any]:
    """Yields the same objects again and again, and changes them in between."""
    buffer, seen = torch.zeros(size), []
    for i in range(n):
        buffer.fill_(i)
        seen.append(i)
        yield buffer
        yield seen
        yield {"buffer": buffer, "seen": (seen, i)}


def references(n: int) -> Iterator[Any]:
    for i in range(n):
        yield rpc.RRef(i)


def mixed() -> Iterator[Any]:
    yield from (None, True, 1, 2.5, "text", b"bytes", (1, [2, {"three": 3}]), {4}, 1j, range(5), "x" * 10_000)


def failing(n: int) -> Iterator[int]:
    yield from range(n)
    raise ValueError(f"no item {n}")


async def failing_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i
    raise KeyError(n)


def not_sendable() -> Iterator[Any]:
    try:
        yield 1
        yield threading.Lock()
        yield 2
    finally:
        closed.append("not_sendable")


def a_list() -> list[int]:
    return [1, 2]


async def a_coroutine() -> int:
    return 1


def stops() -> Any:
    raise StopIteration


def an_iterator(n: int) -> Any:
    return map(str, range(n))


def without_grad(n: int) -> Iterator[bool]:
    """Has grad off while it is suspended."""
    yield torch.is_grad_enabled()
    with torch.no_grad():
        for _ in range(n):
            yield torch.is_grad_enabled()
    yield torch.is_grad_enabled()


def is_grad_enabled() -> bool:
    return torch.is_grad_enabled()


weight = torch.ones(3, requires_grad=True)


def products(x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
    for i in range(n):
        yield x * weight * i


async def products_async(x: torch.Tensor, n: int) -> AsyncIterator[torch.Tensor]:
    for i in range(n):
        yield x * weight * i


def forwarded(to: str, n: int) -> Iterator[int]:
    """Makes calls, and iterates over a stream itself."""
    for i in rpc.stream(to, count, (n,)):
        yield int(rpc.rpc_sync(to, f.add, args=(i,)))
