"""``torch.autocast`` of the caller holds in the functions that it calls, and in those that they call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from torch.futures import Future

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import ProtocolError
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.call_modes import CallModes
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster

WEIGHT = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()


def kind() -> str:
    return str(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)


def kind_on(path: list[str]) -> list[str]:
    return [kind(), *(rpc.rpc_sync(path[0], kind_on, (path[1:],)) if path else [])]


async def kind_in_steps(to: str) -> list[str]:
    found = [kind()]
    for _ in range(3):
        await asyncio.sleep(0)
        found.append(kind())
    found.append(await asyncio.wrap_future(_as_concurrent(rpc.rpc_async(to, kind))))
    with pytest.raises(ZeroDivisionError):
        await _raise_later()
    return [*found, kind()]


async def _raise_later() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError


def _as_concurrent(future: Any) -> Any:
    import concurrent.futures

    made: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.add_done_callback(lambda done: made.set_result(done.wait()))
    return made


@rpc.functions.async_execution
def kind_in_future() -> Future[str]:
    made: Future[str] = Future()
    made.set_result(kind())
    return made


class Layer:
    def __init__(self) -> None:
        self.made_in = kind()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, WEIGHT)

    def kinds(self) -> tuple[str, str]:
        return self.made_in, kind()


def kinds_in_turn(n: int) -> Iterator[str]:
    for _ in range(n):
        yield kind()


async def kinds_in_turn_async(n: int) -> AsyncIterator[str]:
    try:
        for _ in range(n):
            await asyncio.sleep(0)
            yield kind()
    finally:
        await asyncio.sleep(0)
        closed_in.append(kind())


closed_in: list[str] = []


def how_it_was_closed() -> list[str]:
    return sorted(closed_in)


def kind_of(x: torch.Tensor) -> str:
    return str(torch.mm(x, x).dtype)


def layer(x: torch.Tensor) -> torch.Tensor:
    return torch.mm(torch.mm(x, WEIGHT), WEIGHT)


def gradient_of_weight(context_id: int) -> torch.Tensor:
    return dist_autograd.get_gradients(context_id)[WEIGHT]


def _holds() -> None:
    low, plain = "torch.bfloat16", "torch.float32"
    path = ["worker1", "worker2", "worker0"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rpc.rpc_sync("worker1", kind_on, (path[1:],)) == [low] * 3
        assert rpc.rpc_async("worker1", kind).wait() == low
        assert rpc.remote("worker1", kind).to_here() == low
        assert rpc.rpc_sync("worker1", kind_in_future) == low
        assert rpc.rpc_sync("worker1", kind_in_steps, ("worker2",)) == [low] * 6
        reference = rpc.remote("worker1", Layer)
        assert reference.rpc_sync().kinds() == (low, low)  # also if the value is not there yet
        with torch.autocast("cpu", enabled=False):
            assert rpc.rpc_sync("worker1", kind_on, (path[1:],)) == [plain] * 3
        current_agent().call_sync.__self__._sends_autocast = False  # FARPROP_SEND_AUTOCAST=0
        try:
            assert rpc.rpc_sync("worker1", kind_on, (path[1:],)) == [plain] * 3
        finally:
            current_agent().call_sync.__self__._sends_autocast = True
    with torch.autocast("cpu", dtype=torch.float16):
        assert rpc.rpc_sync("worker1", kind) == "torch.float16"
    assert rpc.rpc_sync("worker1", kind_on, (path[1:],)) == [plain] * 3
    assert rpc.rpc_sync("worker1", kind_in_steps, ("worker2",)) == [plain] * 6
    # A function that raises leaves its thread as it was.
    with torch.autocast("cpu"), pytest.raises(RuntimeError):
        rpc.rpc_sync("worker1", layer, (torch.ones(3, 3),))
    assert {rpc.rpc_sync("worker1", kind) for _ in range(20)} == {plain}


def test_it_holds_in_called_functions(workers: Cluster) -> None:
    workers.run(0, _holds)


def _holds_in_streams() -> None:
    low, plain = "torch.bfloat16", "torch.float32"
    for function in (kinds_in_turn, kinds_in_turn_async):
        for to in ("worker1", "worker0"):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                stream = rpc.stream(to, function, (6,), window=2)
                with torch.autocast("cpu", enabled=False):
                    other = rpc.stream(to, function, (6,), window=2)
            # It holds where the stream was opened, not where its items are taken.
            assert list(zip(stream, other, strict=True)) == [(low, plain)] * 6
            assert {rpc.rpc_sync(to, kind) for _ in range(20)} == {plain}
    for to in ("worker1", "worker0"):
        wait_until(lambda to=to: rpc.rpc_sync(to, how_it_was_closed) == [low, plain])


def test_it_holds_in_generators(workers: Cluster) -> None:
    workers.run(0, _holds_in_streams)


async def _stream_before_the_first_call() -> tuple[list[str], bool]:
    """A thread of the pool dials the worker, and sends the call."""
    assert "worker1" not in current_agent().peers.connections
    x = torch.ones(2, 2, requires_grad=True)
    async with dist_autograd.context():
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            stream = rpc.stream("worker1", kinds_in_turn, (3,))
            other = rpc.stream("worker1", _is_leaf, (x,))
        return [item async for item in stream], await anext(other)


def _is_leaf(x: torch.Tensor) -> Iterator[bool]:
    yield x.is_leaf


def _run_stream_before_the_first_call() -> None:
    assert asyncio.run(_stream_before_the_first_call()) == (["torch.bfloat16"] * 3, True)


def test_modes_are_those_of_the_coroutine_that_opens_a_stream() -> None:
    with cluster(2) as job:
        job.run(0, _run_stream_before_the_first_call)


def _holds_in_calls_to_many() -> None:
    low, plain = "torch.bfloat16", "torch.float32"
    names = ["worker0", "worker1", "worker2"]
    for size in (2, 512):  # in the calls themselves, and as a parcel
        x = torch.ones(size, size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            broadcast, mapped = rpc.broadcast(names, kind_of, (x,)), rpc.map(names, kind_of, [(x,)] * 4)
        assert rpc.gather(broadcast) == dict.fromkeys(names, low)
        assert rpc.gather(mapped) == [low] * 4
        assert rpc.gather(rpc.broadcast(names, kind_of, (x,))) == dict.fromkeys(names, plain)


def test_it_holds_in_calls_to_many_workers(workers: Cluster) -> None:
    workers.run(0, _holds_in_calls_to_many)


def _gradients() -> None:
    x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
    with torch.autocast("cpu", cache_enabled=False):
        y = torch.mm(layer(x), x)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    expected, of_weight = x.grad, WEIGHT.grad
    x.grad = WEIGHT.grad = None
    assert of_weight is not None
    with dist_autograd.context() as context_id:
        with torch.autocast("cpu", cache_enabled=False):
            far = torch.mm(rpc.rpc_sync("worker1", layer, (x,)), x)
        assert torch.equal(far, y)
        dist_autograd.backward(context_id, [far.float().sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], expected)
        assert torch.equal(rpc.rpc_sync("worker1", gradient_of_weight, (context_id,)), of_weight)


def test_gradients_are_those_of_one_process(workers: Cluster) -> None:
    workers.run(0, _gradients)


@pytest.mark.parametrize(
    "packed", [b"", b"[]", b'{"autocast":1}', b'{"autocast":{"cpu":"int8"}}', b'{"autocast":{"toaster":"bfloat16"}}']
)
def test_modes_that_make_no_sense_are_refused(packed: bytes) -> None:
    with pytest.raises(ProtocolError):
        CallModes(packed)
