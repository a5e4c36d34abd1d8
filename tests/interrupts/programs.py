"""The programs that are interrupted. Each makes a function: that is what is interrupted, in worker0."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any
from unittest import mock

import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.optim import DistributedOptimizer
from farprop.runtime.agent_registry import current_agent

Operation = Callable[[], object]


class Box:
    """A value with methods, and with parameters."""

    def __init__(self, value: Any = None) -> None:
        self.value = value
        self.weight = torch.nn.Parameter(torch.ones(2))

    def get(self) -> Any:
        return self.value

    def times(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def parameters(self) -> list[rpc.RRef[Any]]:
        return [rpc.RRef(self.weight)]


def same(value: Any) -> Any:
    return value


def make_reference() -> rpc.RRef[Any]:
    return rpc.RRef(Box())


def held(rref: rpc.RRef[Any]) -> bool:
    return bool(rref.owner_name())


def _confirmed(rref: rpc.RRef[Any]) -> rpc.RRef[Any]:
    rref.to_here()
    return rref


def _x() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def sync() -> Operation:
    return lambda: rpc.rpc_sync("worker1", torch.add, args=(torch.ones(2), 1))


def sync_large() -> Operation:
    large = torch.ones(100_000)
    return lambda: rpc.rpc_sync("worker1", same, args=(large,))


def sync_to_self() -> Operation:
    return lambda: rpc.rpc_sync("worker0", torch.add, args=(torch.ones(2), 1))


def async_wait() -> Operation:
    return lambda: rpc.rpc_async("worker1", torch.add, args=(torch.ones(2), 1)).wait()


def async_to_self() -> Operation:
    return lambda: rpc.rpc_async("worker0", torch.add, args=(torch.ones(2), 1)).wait()


def async_with_callback() -> Operation:
    def run() -> None:
        future = rpc.rpc_async("worker1", same, args=(1,))
        last = future.then(lambda done: done.wait())
        future.wait()
        last.wait()

    return run


def wait_for_done() -> Operation:
    """The future may be done before somebody waits, or while the callback that wakes the waiter is added."""
    future = rpc.rpc_async("worker1", same, args=(1,))
    future.then(lambda done: done.wait())
    return future.wait


def async_many() -> Operation:
    def run() -> None:
        for future in [rpc.rpc_async("worker1", same, args=(number,)) for number in range(20)]:
            future.wait()

    return run


def awaited() -> Operation:
    async def main() -> Any:
        return await rpc.rpc_async("worker1", same, args=(1,))

    return lambda: asyncio.run(main())


def awaited_by_asyncio_run() -> Operation:
    """With the handler that asyncio.run installs in programs that have none: the first Ctrl-C cancels the task."""

    async def main() -> Any:
        return await rpc.rpc_async("worker1", same, args=(1,))

    def run() -> None:
        with mock.patch("signal.default_int_handler", signal.getsignal(signal.SIGINT)):
            asyncio.run(main())

    return run


def awaited_together() -> Operation:
    async def main() -> list[Any]:
        return await asyncio.gather(*[rpc.rpc_async("worker1", same, args=(number,)) for number in range(5)])

    return lambda: asyncio.run(main())


def awaited_from_self() -> Operation:
    async def main() -> Any:
        return await rpc.rpc_async("worker0", doubled, args=(1,))

    return lambda: asyncio.run(main())


async def doubled(number: int) -> int:
    """Awaits a call of its own."""
    return 2 * int(await rpc.rpc_async("worker1", same, args=(number,)))


async def linger() -> None:
    """Ends by itself, soon: an interrupt before the cancel leaves the call open."""
    await asyncio.sleep(0.3)


def cancel() -> Operation:
    def run() -> None:
        future = rpc.rpc_async("worker1", linger)
        future.cancel()
        with suppress(CancelledError):
            future.wait()

    return run


def cancel_remote() -> Operation:
    def run() -> None:
        rref = rpc.remote("worker1", linger)
        rref._get_future().cancel()

    return run


def cancelled_task() -> Operation:
    async def main() -> None:
        task = asyncio.ensure_future(rpc.rpc_async("worker1", linger))
        await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    return lambda: asyncio.run(main())


def numbers(n: int) -> Iterator[int]:
    yield from range(n)


async def numbers_async(n: int) -> AsyncIterator[int]:
    for number in range(n):
        yield number


def stream() -> Operation:
    return lambda: list(rpc.stream("worker1", numbers, args=(5,), window=2))


def stream_left_early() -> Operation:
    def run() -> None:
        for number in rpc.stream("worker1", numbers, args=(1000,), window=2):
            if number == 3:
                break

    return run


def stream_in_coroutine() -> Operation:
    async def main() -> list[int]:
        return [number async for number in rpc.stream("worker1", numbers_async, args=(5,), window=2)]

    return lambda: asyncio.run(main())


def many() -> Operation:
    large = torch.ones(100_000)
    return lambda: rpc.gather(rpc.broadcast(["worker0", "worker1"], same, args=(large,)))


def many_small() -> Operation:
    return lambda: rpc.gather(rpc.broadcast(["worker0", "worker1"], same, args=(1,)))


def many_mapped() -> Operation:
    large = torch.ones(100_000)
    return lambda: rpc.gather(rpc.map(["worker0", "worker1"], pair, [(large, number) for number in range(4)]))


def pair(tensor: torch.Tensor, number: int) -> tuple[float, int]:
    return float(tensor[0]), number


def many_on_other_hosts() -> Operation:
    """The parcel goes in chunks."""
    large = torch.ones(600_000)

    def run() -> None:
        with mock.patch.object(current_agent().call_many.__self__, "_is_near", return_value=False):
            rpc.gather(rpc.broadcast(["worker0", "worker1"], same, args=(large,)))

    return run


def remote() -> Operation:
    return lambda: rpc.remote("worker1", Box, args=(1,)).to_here()


def remote_to_self() -> Operation:
    return lambda: rpc.remote("worker0", Box, args=(1,)).to_here()


def own_reference() -> Operation:
    def run() -> None:
        rref = rpc.RRef(Box())
        rpc.rpc_sync("worker1", held, args=(rref,))
        del rref

    return run


def own_reference_in_remote() -> Operation:
    def run() -> None:
        rref = rpc.RRef(Box())
        rpc.remote("worker1", Box, args=(rref,))
        rpc.rpc_async("worker1", held, args=(rref,)).wait()

    return run


def reference_in_answer() -> Operation:
    return lambda: rpc.rpc_sync("worker1", make_reference)


def reference_to_its_owner() -> Operation:
    rref = _confirmed(rpc.remote("worker1", Box))
    return lambda: rpc.rpc_sync("worker1", held, args=(rref,))


def reference_to_oneself() -> Operation:
    rref = _confirmed(rpc.remote("worker1", Box))
    return lambda: rpc.rpc_sync("worker0", held, args=(rref,))


def drop() -> Operation:
    return [_confirmed(rpc.remote("worker1", Box))].clear


def proxy_sync() -> Operation:
    rref = _confirmed(rpc.remote("worker1", Box, args=(1,)))
    return lambda: rref.rpc_sync().get()


def proxy_async() -> Operation:
    rref = _confirmed(rpc.remote("worker1", Box, args=(1,)))
    return lambda: rref.rpc_async().get().wait()


def proxy_remote() -> Operation:
    rref = _confirmed(rpc.remote("worker1", Box, args=(1,)))
    return lambda: rref.remote().get().to_here()


def empty_context() -> Operation:
    def run() -> None:
        with dist_autograd.context():
            pass

    return run


def context() -> Operation:
    x = _x()

    def run() -> None:
        with dist_autograd.context():
            rpc.rpc_sync("worker1", torch.mul, args=(x, 2))

    return run


def backward() -> Operation:
    x = _x()

    def run() -> None:
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 2)).sum()
            dist_autograd.backward(context_id, [loss])
            dist_autograd.get_gradients(context_id)

    return run


def backward_with_shared_nodes() -> Operation:
    x = _x()

    def run() -> None:
        with dist_autograd.context() as context_id:
            y = x * 2
            first = rpc.rpc_async("worker1", torch.mul, args=(y, 2))
            second = rpc.rpc_sync("worker1", torch.mul, args=(y, y))
            rpc.rpc_sync("worker1", torch.mul, args=(y, 5))  # not used
            dist_autograd.backward(context_id, [(first.wait() + second + y).sum()])

    return run


def step() -> Operation:
    x = _x()
    far, near = _confirmed(rpc.remote("worker1", Box)), rpc.RRef(Box())
    parameters = [*far.rpc_sync().parameters(), *near.local_value().parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)

    def run() -> None:
        with dist_autograd.context() as context_id:
            loss = (far.rpc_sync().times(x) + near.local_value().times(x)).sum()
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)

    return run


PROGRAMS: dict[str, Callable[[], Operation]] = {
    program.__name__: program
    for program in (
        sync,
        sync_large,
        sync_to_self,
        async_wait,
        async_to_self,
        async_with_callback,
        wait_for_done,
        async_many,
        awaited,
        awaited_by_asyncio_run,
        awaited_together,
        awaited_from_self,
        cancel,
        cancel_remote,
        cancelled_task,
        stream,
        stream_left_early,
        stream_in_coroutine,
        many,
        many_small,
        many_mapped,
        many_on_other_hosts,
        remote,
        remote_to_self,
        own_reference,
        own_reference_in_remote,
        reference_in_answer,
        reference_to_its_owner,
        reference_to_oneself,
        drop,
        proxy_sync,
        proxy_async,
        proxy_remote,
        empty_context,
        context,
        backward,
        backward_with_shared_nodes,
        step,
    )
}
