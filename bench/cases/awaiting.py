"""Calls that are awaited. Torch's futures can't be, so there a bridge does what people write by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from bench.cases import Api, Sample, case
from bench.cases.calls import noop
from bench.side import side

TOGETHER = 1000
IN_TURN = 20


async def coroutine() -> None:
    await asyncio.sleep(0)


@side.async_execution
def completed() -> torch.futures.Future[None]:
    """What torch has in place of ``async def`` functions."""
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return future


def bridged(future: Any) -> Awaitable[Any]:
    """An asyncio future that a callback of a torch future completes."""
    loop = asyncio.get_running_loop()
    awaited = loop.create_future()

    def complete() -> None:
        if not awaited.done():
            awaited.set_result(future.value())

    future.add_done_callback(lambda _: loop.call_soon_threadsafe(complete))
    return awaited


def _awaited(api: Api) -> Callable[[Any], Awaitable[Any]]:
    return (lambda future: future) if api.package == "farprop" else bridged


@case("await", "await of an empty call, one after the other", goal=2, samples=20, warmup=1, calls=IN_TURN)
def one_await(api: Api, peer: str) -> Sample:
    rpc_async, awaited, loop = api.rpc.rpc_async, _awaited(api), asyncio.new_event_loop()

    async def calls() -> None:
        for _ in range(IN_TURN):
            await awaited(rpc_async(peer, noop))

    return lambda: loop.run_until_complete(calls())


@case("await-1000", "1,000 empty calls awaited together, a call", goal=4, samples=1, warmup=0, calls=TOGETHER)
def many_awaits(api: Api, peer: str) -> Sample:
    return _together(api, peer, noop)


@case("coroutine-1000", "1,000 calls of async functions awaited, a call", goal=2, samples=1, warmup=0, calls=TOGETHER)
def many_coroutines(api: Api, peer: str) -> Sample:
    return _together(api, peer, coroutine if api.package == "farprop" else completed)


def _together(api: Api, peer: str, function: Callable[[], Any]) -> Sample:
    rpc_async, awaited, loop = api.rpc.rpc_async, _awaited(api), asyncio.new_event_loop()

    async def calls() -> None:
        await asyncio.gather(*[awaited(rpc_async(peer, function)) for _ in range(TOGETHER)])

    return lambda: loop.run_until_complete(calls())
