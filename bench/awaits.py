"""`python -m bench.awaits`: the memory and the threads of 10,000 calls that one loop awaits at the same time."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from pathlib import Path

import farprop
import farprop.rpc as rpc

CALLS = 10_000

_open: asyncio.Event | None = None


async def at_gate(number: int) -> int:
    """Wait until the gate opens."""
    await _gate().wait()
    return number


async def open_gate() -> None:
    _gate().set()


def _gate() -> asyncio.Event:
    global _open
    _open = _open or asyncio.Event()
    return _open


def _resident() -> int:
    """The resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _facts() -> tuple[int, int]:
    gc.collect()
    return _resident(), threading.active_count()


async def _calls(name: str) -> None:
    await rpc.rpc_async(name, _facts)
    here, there = _facts(), await rpc.rpc_async(name, _facts)
    began = time.perf_counter()
    awaited = asyncio.gather(*[rpc.rpc_async(name, at_gate, args=(number,), timeout=0) for number in range(CALLS)])
    await asyncio.sleep(0)
    sent = time.perf_counter() - began
    while_open = _facts(), await rpc.rpc_async(name, _facts)
    began = time.perf_counter()
    await rpc.rpc_async(name, open_gate)
    assert await awaited == list(range(CALLS))
    answered = time.perf_counter() - began
    print(f"{CALLS:,} calls are awaited at once: {sent:.2f} s to make them, {answered:.2f} s until all have answered")
    for who, before, during in (("caller", here, while_open[0]), ("callee", there, while_open[1])):
        each = (during[0] - before[0]) / CALLS
        print(f"{who}: {each:,.0f} bytes a call; {before[1]} threads before, {during[1]} meanwhile")


def main() -> None:
    with farprop.workers(1):
        asyncio.run(_calls("worker0"))


if __name__ == "__main__":
    from bench.awaits import main as importable  # so that functions travel by name

    importable()
