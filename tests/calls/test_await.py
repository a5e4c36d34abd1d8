"""Futures and references are awaited in asyncio programs, and called coroutines await theirs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import UsageError
from tests.calls import functions as f
from tests.support.workers import cluster

MANY = 2000


async def _all_ways() -> None:
    def call(value: int) -> Any:
        return rpc.rpc_async("worker1", f.add, args=(value,))

    assert await call(1) == 2
    done = call(2)
    done.wait()
    assert await done == await done == 3
    assert await asyncio.gather(*map(call, range(50))) == list(range(1, 51))
    assert await asyncio.wait_for(call(3), 30) == 4
    assert sorted([await first for first in asyncio.as_completed(map(call, range(5)))]) == [1, 2, 3, 4, 5]
    assert await asyncio.shield(call(4)) == 5
    assert await asyncio.ensure_future(call(5)) == 6

    async def nested(value: int) -> Any:
        return await call(value)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(nested(value)) for value in range(5)]
    assert [task.result() for task in tasks] == [1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="wrong") as raised:
        await rpc.rpc_async("worker1", f.raise_value_error, args=("wrong",))
    assert "Raised on worker1" in raised.value.__notes__[0]
    assert await rpc.rpc_async("worker0", f.add, args=(1,)) == 2  # to itself
    with pytest.raises(TypeError, match=r"asyncio\.wait takes tasks, and not <Future of .*ensure_future"):
        await asyncio.wait([call(6)])  # type: ignore[type-var]
    done_tasks, _ = await asyncio.wait([asyncio.ensure_future(call(7))])
    assert done_tasks.pop().result() == 8


async def _references() -> None:
    counter = rpc.remote("worker1", f.Counter, args=(5,))
    assert await counter._get_future() is None
    assert await counter.rpc_async().plus(2) == 7
    assert await rpc.remote("worker1", f.add, args=(1,)) == 2
    assert await rpc.RRef(3) == 3
    pending = rpc.remote("worker0", f.wait_for_gate)  # this worker is the owner, and the value is not there
    later = asyncio.ensure_future(_await(pending))
    await asyncio.sleep(0)
    f.gate.set()
    assert await later == "through"
    with pytest.raises(ValueError, match="wrong"):
        await rpc.remote("worker1", f.raise_value_error, args=("wrong",))


async def _await(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _run(main: Callable[..., Any], *args: Any) -> Any:
    return asyncio.run(main(*args))


def test_everything_of_asyncio_takes_futures(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _run, _all_ways)
        c.run(0, _run, _references)


async def _await_many() -> tuple[int, int]:
    before = threading.active_count()
    futures = [rpc.rpc_async("worker1", f.coroutine_at_gate, args=(number,)) for number in range(MANY)]
    awaited = asyncio.gather(*futures)
    await asyncio.sleep(0)
    rpc.rpc_sync("worker1", f.open_gate)
    assert await awaited == list(range(MANY))
    return before, threading.active_count()


@pytest.mark.one_transport
def test_many_awaits_take_no_threads() -> None:
    with cluster(2) as c:
        before, after = c.run(0, _run, _await_many)
        assert after - before < 50  # the pool has a few more when many answers come at once, whatever their number


def _await_in_several_loops() -> list[Any]:
    future = rpc.rpc_async("worker1", f.wait_for_gate)
    awaiting = threading.Barrier(4)

    async def wait_for_it() -> Any:
        asyncio.get_running_loop().call_soon(awaiting.wait)
        return await future

    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(asyncio.run(wait_for_it()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    awaiting.wait(30)
    closed = asyncio.new_event_loop()  # one that does not live to see it
    left = closed.create_task(_await(future))
    closed.run_until_complete(asyncio.sleep(0))
    closed.close()
    rpc.rpc_sync("worker1", f.open_gate)
    for thread in threads:
        thread.join(30)
    left._log_destroy_pending = False  # type: ignore[attr-defined]
    return [*results, future.wait()]


@pytest.mark.one_transport
def test_several_loops_await_one_future_and_one_of_them_is_closed() -> None:
    with cluster(2) as c:
        assert c.run(0, _await_in_several_loops) == ["through"] * 4


async def _cancelled_tasks() -> None:
    alone = rpc.rpc_async("worker1", f.coroutine_until_cancelled, args=("alone",))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(alone, 0.001)
    assert alone.cancelled()

    shielded = rpc.rpc_async("worker1", f.coroutine_at_gate, args=(7,))
    outer = asyncio.shield(shielded)
    outer.cancel()
    shared = rpc.rpc_async("worker1", f.coroutine_at_gate, args=(8,))
    tasks = [asyncio.ensure_future(shared) for _ in range(2)]
    await asyncio.sleep(0)
    tasks[0].cancel()  # the other one still wants it
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    both = rpc.rpc_async("worker1", f.coroutine_until_cancelled, args=("both",))
    tasks_of_both = [asyncio.ensure_future(both) for _ in range(2)]
    await asyncio.sleep(0)
    for task in tasks_of_both:
        task.cancel()
    await asyncio.gather(*tasks_of_both, return_exceptions=True)
    assert both.cancelled()
    with pytest.raises(asyncio.CancelledError):
        await both
    await rpc.rpc_async("worker1", f.open_gate)
    assert await shielded == 7
    assert await tasks[1] == 8
    fetched = rpc.remote("worker1", f.coroutine_until_cancelled, args=("value",))
    fetching = asyncio.ensure_future(_await(fetched))
    await rpc.rpc_async("worker1", f.wait_until_noted, args=(("begins", "value"),))
    fetching.cancel()  # the fetch, and not what makes the value: others may have the reference, too
    with pytest.raises(asyncio.CancelledError):
        await fetching
    assert ("cancelled", "value") not in await rpc.rpc_async("worker1", f.noted)
    fetched._get_future().cancel()
    await rpc.rpc_async("worker1", f.wait_until_noted, args=(("cancelled", "value"),))


@pytest.mark.one_transport
def test_cancelled_task_cancels_its_call() -> None:
    with cluster(2) as c:
        c.run(0, _run, _cancelled_tasks)


# Called coroutines

_meeting = threading.Barrier(10)


def _meet() -> int:
    return _meeting.wait(30)


async def _meet_at(worker: str) -> Any:
    return await rpc.rpc_async(worker, _meet)


async def _ten_coroutines() -> list[int]:
    return sorted(await asyncio.gather(*[rpc.rpc_async("worker1", _meet_at, args=("worker0",)) for _ in range(10)]))


@pytest.mark.one_transport
def test_called_coroutines_make_calls_at_the_same_time() -> None:
    with cluster(2) as c:
        # Each call waits for the other nine.
        assert c.run(0, _run, _ten_coroutines) == list(range(10))


async def _blocking(how: str) -> Any:
    if how == "rpc_sync":
        return rpc.rpc_sync("worker0", f.noop)
    if how == "wait":
        return rpc.rpc_async("worker0", f.wait_for_gate).wait()
    if how == "to_here":
        return rpc.remote("worker0", f.noop).to_here()
    if how == "local_value":
        return rpc.remote("worker1", f.wait_for_gate).local_value()
    if how == "rpc.gather":
        return rpc.gather(rpc.broadcast(["worker0"], f.wait_for_gate))
    if how == "for":
        return next(rpc.stream("worker0", _numbers))
    if how == "wait_for_workers":
        return rpc.wait_for_workers(3, timeout=60)
    if how == "backward":
        async with dist_autograd.context() as context_id:
            return dist_autograd.backward(context_id, [torch.ones(1, requires_grad=True).sum()])
    return await asyncio.to_thread(rpc.rpc_sync, "worker0", f.add, (1,))


def _numbers() -> Iterator[int]:
    f.gate.wait()
    yield 1


def _block_in_coroutines() -> int:
    for how in ("rpc_sync", "wait", "to_here", "local_value", "backward", "rpc.gather", "for", "wait_for_workers"):
        with pytest.raises(UsageError, match=r"would block all coroutines of worker1.*await"):
            rpc.rpc_sync("worker1", _blocking, args=(how,))
    rpc.rpc_sync("worker1", f.open_gate)
    f.gate.set()
    return rpc.rpc_sync("worker1", _blocking, args=("in a thread",))  # type: ignore[no-any-return]


@pytest.mark.one_transport
def test_called_coroutine_that_would_block_the_others_is_told_to_await() -> None:
    with cluster(2) as c:
        assert c.run(0, _block_in_coroutines) == 2


# Autograd contexts


async def _hop(worker: str, x: torch.Tensor) -> torch.Tensor:
    y = await rpc.rpc_async(worker, torch.mul, args=(x, 3.0))
    return y * 2  # type: ignore[no-any-return]


async def _step(number: int) -> tuple[int, float]:
    x = torch.full((2,), float(number), requires_grad=True)
    async with dist_autograd.context() as context_id:
        # Tasks that are started inside belong to the context, too.
        y, z = await asyncio.gather(
            _await(rpc.rpc_async("worker1", _hop, args=("worker0", x))),
            _await(rpc.rpc_async("worker1", torch.mul, args=(x, x))),
        )
        await asyncio.sleep(0)
        assert dist_autograd._current_context()._context_id() == context_id
        await asyncio.to_thread(dist_autograd.backward, context_id, [(y + z).sum()])
        (gradient,) = dist_autograd.get_gradients(context_id).values()
        assert torch.equal(gradient, 6 + 2 * x.detach())
    return context_id, float(gradient[0])


async def _steps() -> None:
    results = await asyncio.gather(*map(_step, range(4)))
    assert len({context_id for context_id, _ in results}) == 4
    assert [gradient for _, gradient in results] == [6.0, 8.0, 10.0, 12.0]

    go_on = asyncio.Event()

    async def outlive() -> int:
        await go_on.wait()
        async with dist_autograd.context() as context_id:  # its creator's has ended
            return int(context_id)

    async with dist_autograd.context() as outer:
        later = asyncio.create_task(outlive())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="Already have an autograd context"):
            async with dist_autograd.context():
                pass
        with pytest.raises(UsageError, match="Already have an autograd context"):
            await asyncio.create_task(_step(1))
    go_on.set()
    assert await later != outer
    with pytest.raises(UsageError):
        dist_autograd._current_context()


@pytest.mark.one_transport
def test_each_task_has_its_autograd_context() -> None:
    with cluster(2) as c:
        c.run(0, _run, _steps)
