"""``rpc.stream``: items in order, windows, errors in the middle, early ends, and the deaths of both ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, closing
from typing import Any

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RpcTimeoutError, UsageError
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.futures import Future
from farprop.wire.message import Method
from tests.calls import functions as f
from tests.calls import stream_functions as s
from tests.references.looking import wait_until
from tests.support import lock_order
from tests.support.workers import cluster, run_workers


@pytest.fixture(autouse=True)
def _check_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(lock_order.VARIABLE, "1")


def _there(function: Callable[..., Any], *args: Any) -> Any:
    return rpc.rpc_sync("worker1", function, args=args)


async def _collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


def _iterate() -> None:
    for window in (1, 2, 16, 100):
        for n in (0, 1, 50):
            assert list(rpc.stream("worker1", s.count, (n,), {"start": 7}, window=window)) == list(range(7, 7 + n))
            assert list(rpc.stream(1, s.count_async, (n,), window=window)) == list(range(n))
            assert asyncio.run(_collect(rpc.stream("worker1", s.count, (n,), window=window))) == list(range(n))
            assert asyncio.run(_collect(rpc.stream("worker1", s.count_async, (n,), window=window))) == list(range(n))
    assert list(rpc.stream("worker1", s.mixed)) == list(s.mixed())
    assert list(rpc.stream("worker1", s.an_iterator, (5,))) == ["0", "1", "2", "3", "4"]
    assert list(rpc.stream("worker1", lambda n: (i * i for i in range(n)), (4,))) == [0, 1, 4, 9]
    assert list(rpc.stream("worker0", s.count, (20,), window=3)) == list(range(20)), "to oneself"
    for size in (10, 5_000, 200_000):
        for i, tensor in enumerate(rpc.stream("worker1", s.tensors, (20, size))):
            assert torch.equal(tensor, torch.full((size,), float(i)))
        same = rpc.stream("worker1", s.reused, (20, size))
        for i, (tensor, seen, both) in enumerate(zip(same, same, same, strict=True)):
            assert torch.equal(tensor, torch.full((size,), float(i))), "changed after it was yielded"
            assert seen == list(range(i + 1))
            assert torch.equal(both["buffer"], tensor)
            assert both["seen"] == (seen, i)
    assert [rref.to_here() for rref in rpc.stream("worker1", s.references, (10,))] == list(range(10))
    assert list(rpc.stream("worker1", s.forwarded, ("worker0", 30))) == list(range(1, 31))
    # Several at once, in turns.
    streams = [rpc.stream("worker1", s.count, (100,), window=1 + i) for i in range(8)]
    assert list(zip(*streams, strict=True)) == [(i,) * 8 for i in range(100)]
    # Mixed ways to take items of one.
    stream = rpc.stream("worker1", s.count, (10,), window=2)
    assert next(stream) == 0
    assert asyncio.run(anext(stream)) == 1
    assert list(stream) == list(range(2, 10))
    assert next(stream, "over") == "over"


@pytest.mark.without_tls_too
def test_items_arrive_in_order(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _iterate)


def _raised_by(stream: rpc.Stream[Any]) -> tuple[list[Any], BaseException | None]:
    got: list[Any] = []
    try:
        for item in stream:
            got.append(item)
    except Exception as error:
        assert list(stream) == [], "it goes on after an error"
        return got, error
    return got, None


def _meet_errors() -> None:
    for window in (1, 4, 16):
        got, error = _raised_by(rpc.stream("worker1", s.failing, (10,), window=window))
        assert got == list(range(10))
        assert isinstance(error, ValueError)
        assert str(error) == "no item 10"
        assert "Raised on worker1" in error.__notes__[0]
        assert "in failing" in error.__notes__[0]
        got, error = _raised_by(rpc.stream("worker1", s.failing_async, (10,), window=window))
        assert got == list(range(10))
        assert isinstance(error, KeyError)
    got, error = _raised_by(rpc.stream("worker1", s.not_sendable))
    assert got == [1]
    assert isinstance(error, TypeError)
    assert "lock" in str(error)
    wait_until(lambda: _there(s.is_closed, "not_sendable"))
    for function, text in ((s.a_list, "returned a list"), (s.a_coroutine, "async def function without yield")):
        got, error = _raised_by(rpc.stream("worker1", function))  # type: ignore[call-overload]
        assert got == []
        assert isinstance(error, UsageError)
        assert text in str(error)
        assert "rpc_sync" in str(error)
        assert function.__name__ in str(error)
    got, error = _raised_by(rpc.stream("worker1", s.stops))
    assert type(error) is RuntimeError, "an error is not an end"
    assert "StopIteration" in str(error)
    _, error = _raised_by(rpc.stream("worker1", s.count))
    assert isinstance(error, TypeError)
    assert "missing" in str(error)
    with pytest.raises(UsageError, match="nobody"):
        rpc.stream("nobody", s.count, (1,))
    with pytest.raises(TypeError, match="callable"):
        rpc.stream("worker1", "count")
    with pytest.raises(TypeError, match="Send its items"):
        _there(f.identity, rpc.stream("worker1", s.count, (1,)))
    for window in (0, -1, 1 << 20):
        with pytest.raises(ValueError, match="window is from 1"):
            rpc.stream("worker1", s.count, (1,), window=window)
    with pytest.raises(TypeError, match="number of items"):
        rpc.stream("worker1", s.count, (1,), window=2.0)  # type: ignore[call-overload]


def _meet_timeouts() -> None:
    stream = rpc.stream("worker1", s.waiting_for_gate, ("timed",), timeout=0.3)
    assert next(stream) == 0
    with pytest.raises(RpcTimeoutError, match="has not produced item 1 of .*waiting_for_gate.*0.3 s") as caught:
        next(stream)
    assert caught.value.worker == "worker1"
    assert "waiting_for_gate" in str(caught.value.function)
    assert list(stream) == [], "it is closed"
    stream = rpc.stream("worker1", s.never, ("timed async",), timeout=0.3)

    async def time_out() -> None:
        assert await anext(stream) == 0
        with pytest.raises(RpcTimeoutError, match="item 1"):
            await anext(stream)

    asyncio.run(time_out())
    wait_until(lambda: _there(s.is_closed, "timed async"))
    assert not _there(s.is_closed, "timed"), "it still waits for the gate"
    _there(s.open_gate)
    wait_until(lambda: _there(s.is_closed, "timed"))


@pytest.mark.one_transport
def test_errors_and_timeouts(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _meet_errors)
        c.run(0, _meet_timeouts)


def _keep_to_window() -> None:
    for function in (s.noting, s.noting_async):
        for window in (1, 5):
            name = f"{function.__name__} {window}"
            with rpc.stream("worker1", function, (name,), window=window) as stream:
                wait_until(lambda name=name, window=window: _there(s.produced_by, name) == window)  # type: ignore[misc]
                for taken in range(1, 20):
                    assert next(stream) == taken - 1
                    assert _there(s.produced_by, name) <= taken + window
            wait_until(lambda name=name: _there(s.is_closed, name))  # type: ignore[misc]


def _fill_no_pool() -> None:
    streams = [rpc.stream("worker1", s.noting, (f"many {i}",), window=2) for i in range(50)]
    assert [next(stream) for stream in streams] == [0] * 50
    assert _there(f.add, 1) == 2, "two threads, and fifty generators that wait"
    assert len(current_agent().streams) == 50
    streams.clear()
    wait_until(lambda: len([name for name in _there(s.all_closed) if str(name).startswith("many")]) == 50)
    modes = rpc.stream("worker1", s.without_grad, (40,), window=3)
    assert next(modes)
    for mode in modes:
        assert _there(s.is_grad_enabled), "a generator has left its mode behind"
        if mode:
            break
    assert next(modes, None) is None, "the modes of the generator are its own"


@pytest.mark.one_transport
def test_windows(env: dict[str, str]) -> None:
    with cluster(2, env, options={"num_worker_threads": 2}) as c:
        c.run(0, _keep_to_window)
        c.run(0, _fill_no_pool)
        assert c.run(1, _served) == 0


def _served() -> int:
    wait_until(lambda: not len(current_agent().served_streams))
    return len(current_agent().served_streams)


class _Cycle:
    def __init__(self, stream: rpc.Stream[Any]) -> None:
        self.stream, self.itself = stream, self


def _break(stream: rpc.Stream[int]) -> None:
    for i in stream:
        if i == 5:
            break


def _raise(stream: rpc.Stream[int]) -> None:
    for _ in stream:
        raise LookupError


def _end_early(kind: str, stream: rpc.Stream[int]) -> None:
    assert next(stream) == 0
    if kind == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
        assert "closed" in repr(stream)
    elif kind == "with":
        with pytest.raises(LookupError), stream:
            raise LookupError
    elif kind == "closing":
        with closing(stream):
            assert next(stream) == 1
    elif kind == "exception":
        with pytest.raises(LookupError):
            _raise(stream)
    elif kind == "cycle":
        _Cycle(stream)
    else:
        _break(stream)


async def _end_early_async(kind: str, stream: rpc.Stream[int]) -> None:
    assert await anext(stream) == 0
    if kind == "aclose":
        await stream.aclose()
        assert await _collect(stream) == []
    elif kind == "async with":
        async with stream:
            assert await anext(stream) == 1
    elif kind == "aclosing":
        async with aclosing(stream) as items:
            assert await anext(items) == 1
    elif kind == "break":
        async for i in stream:
            if i == 5:
                break
    else:
        has_one = asyncio.Event()

        async def take() -> None:
            async for _ in rpc.stream("worker1", s.never, (f"{kind} task",)):
                has_one.set()

        never = asyncio.ensure_future(take())
        await has_one.wait()
        never.cancel()
        with pytest.raises(asyncio.CancelledError):
            await never


def _close_early() -> None:
    for function in (s.noting, s.noting_async):
        names = []
        for kind in ("close", "with", "closing", "exception", "cycle", "break"):
            names.append(f"{function.__name__} {kind}")
            _end_early(kind, rpc.stream("worker1", function, (names[-1],)))
        for kind in ("aclose", "async with", "aclosing", "break"):
            names.append(f"{function.__name__} {kind} async")
            asyncio.run(_end_early_async(kind, rpc.stream("worker1", function, (names[-1],))))
        gc.collect()
        wait_until(lambda names=names: set(names) <= set(_there(s.all_closed)))  # type: ignore[misc]
    asyncio.run(_end_early_async("cancel", rpc.stream("worker1", s.count, (10,))))
    wait_until(lambda: _there(s.is_closed, "cancel task"))
    # Inside of an await of its own, and never taken from at all.
    stream = rpc.stream("worker1", s.never, ("awaiting",))
    assert next(stream) == 0
    del stream
    wait_until(lambda: _there(s.is_closed, "awaiting"))
    rpc.stream("worker1", s.noting, ("dropped at once",))
    wait_until(lambda: not len(current_agent().streams))
    # Another thread closes it while this one waits for an item.
    stream = rpc.stream("worker1", s.never, ("by another thread",))
    assert next(stream) == 0
    closer = threading.Thread(target=lambda: (wait_until(lambda: stream._call.is_awaited), stream.close()))
    closer.start()
    assert list(stream) == []
    closer.join()
    # Two threads can't take items at the same time.
    stream = rpc.stream("worker1", s.never, ("two threads",))
    assert next(stream) == 0
    taker = threading.Thread(target=lambda: list(stream))
    taker.start()
    wait_until(lambda: stream._call.is_awaited)
    with pytest.raises(UsageError, match="Two threads"):
        next(stream)
    stream.close()
    taker.join()


@pytest.mark.without_tls_too
def test_early_ends_close_the_generator(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _close_early)
        assert c.run(1, _served) == 0


def _hundred_at_once() -> None:
    async def main() -> None:
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                beats += 1
                await asyncio.sleep(0.001)

        beating = asyncio.ensure_future(beat())
        before = threading.active_count()
        functions: list[Callable[..., Any]] = [s.count, s.count_async]
        streams = [rpc.stream(f"worker{1 + i % 2}", functions[i // 2 % 2], (30,), window=4) for i in range(100)]
        most = 0

        async def take(stream: rpc.Stream[int]) -> list[int]:
            nonlocal most
            got = []
            async for item in stream:
                most = max(most, threading.active_count())
                got.append(item)
            return got

        assert await asyncio.gather(*map(take, streams)) == [list(range(30))] * 100
        assert most - before < 25, "threads for streams"
        # The loop goes on while an item is awaited.
        waiting = rpc.stream("worker1", s.waiting_for_gate, ("async",))
        assert await anext(waiting) == 0
        second = asyncio.ensure_future(anext(waiting))  # type: ignore[arg-type]
        seen = beats
        while beats < seen + 5:
            await asyncio.sleep(0)
        assert not second.done()
        await asyncio.to_thread(_there, s.open_gate)
        assert await second == 1
        beating.cancel()

    asyncio.run(main())


def _open_to_stopped(pid: int) -> None:
    """Open streams in an event loop to a worker that is not connected, and can't be just now."""

    async def main() -> None:
        before = threading.active_count()
        streams = [rpc.stream("worker1", s.count, (3,)) for _ in range(100)]
        closed = [rpc.stream("worker1", s.noting, (i,)) for i in range(20)]
        taking = [asyncio.ensure_future(_collect(stream)) for stream in streams]
        late = rpc.stream("worker1", s.count, (3,), timeout=0.1)
        with pytest.raises(RpcTimeoutError):
            await anext(late)  # all others have been submitted before
        assert threading.active_count() - before < 25  # the pool's, and few more
        for stream in closed:
            await stream.aclose()
        os.kill(pid, signal.SIGCONT)
        assert await asyncio.gather(*taking) == [[0, 1, 2]] * 100

    asyncio.run(main())
    assert rpc.rpc_sync("worker1", _served) == 0


@pytest.mark.one_transport
def test_streams_that_wait_for_a_connection_have_no_thread_and_are_closed_early() -> None:
    with cluster(2) as c:
        c.signal(1, signal.SIGSTOP)
        c.run(0, _open_to_stopped, c.pid(1))


@pytest.mark.one_transport
def test_a_hundred_streams_in_one_event_loop(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _hundred_at_once)


def _iterate_until_lost(n: int) -> tuple[int, str, str, str]:
    stream = rpc.stream("worker1", s.noting, ("lost",), window=4)
    got = [next(stream) for _ in range(n)]
    assert got == list(range(n))
    rpc.rpc_async("worker1", os.kill, args=(_there(f.own_pid), signal.SIGKILL))
    with pytest.raises(ConnectionLostError) as caught:
        for item in stream:
            assert item == len(got)
            got.append(item)
            assert len(got) < 1_000_000
    return len(got), str(caught.value), str(caught.value.worker), str(caught.value.function)


def test_the_callee_dies(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        items, text, worker, function = c.run(0, _iterate_until_lost, 10)
        assert items >= 10
        assert worker == "worker1"
        assert function.endswith("noting")
        assert f"after {items} items" in text
        assert "noting from worker1" in text
        c.wait(1)


def _open_two() -> list[int]:
    s.kept = [rpc.stream("worker1", s.noting, ("orphan",)), rpc.stream("worker1", s.never, ("async orphan",))]
    return [next(stream) for stream in s.kept]


def _both_orphans_closed() -> None:
    wait_until(lambda: {"orphan", "async orphan"} <= set(s.closed))
    assert _served() == 0


def test_the_caller_dies(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        assert c.run(0, _open_two) == [0, 0]
        c.kill(0)
        c.run(1, _both_orphans_closed)


def _interrupted() -> None:
    stream = rpc.stream("worker1", s.never, ("interrupted",))
    assert next(stream) == 0
    killer = threading.Thread(
        target=lambda: (wait_until(lambda: stream._call.is_awaited), os.kill(os.getpid(), signal.SIGINT))
    )
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in stream:
            pass
    killer.join()
    wait_until(lambda: _there(s.is_closed, "interrupted"))
    assert list(rpc.stream("worker1", s.count, (20,))) == list(range(20))


@pytest.mark.one_transport
def test_an_interrupt_closes_the_stream(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _interrupted)


def _gradients_flow(mode: str) -> None:
    x = torch.ones(3, requires_grad=True)
    for function in (s.products, s.products_async):
        with dist_autograd.context() as context_id:
            loss = sum(item.sum() for item in rpc.stream("worker1", function, (x, 5), window=2))
            dist_autograd.backward(context_id, [loss])  # type: ignore[list-item]
            assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.full((3,), 10.0))
            there = _there(_gradient_of_weight, context_id)
            assert torch.equal(there, torch.full((3,), 10.0))
    if mode == "fast":
        return  # waits for gradients of every item
    with dist_autograd.context() as context_id:
        items = list(rpc.stream("worker1", s.products, (x, 5)))
        for item in items[1:4]:  # each has a graph of its own, which one pass uses up
            dist_autograd.backward(context_id, [item.sum()])
        assert torch.equal(dist_autograd.get_gradients(context_id)[x], torch.full((3,), 6.0))
        assert torch.equal(_there(_gradient_of_weight, context_id), torch.full((3,), 6.0))


def _gradient_of_weight(context_id: int) -> torch.Tensor:
    return dist_autograd.get_gradients(context_id)[s.weight]


@pytest.mark.one_transport
@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_gradients_flow_through_items(env: dict[str, str], mode: str) -> None:
    with cluster(2, {**env, "FARPROP_AUTOGRAD_MODE": mode}) as c:
        c.run(0, _gradients_flow, mode)


def _shut_down_with_open_streams(rank: int) -> list[Any]:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    streams: list[rpc.Stream[int]] = []
    if rank == 0:
        streams = [rpc.stream("worker1", function, (name,)) for name, function in _OPEN.items()]
        assert [next(stream) for stream in streams] == [0] * len(streams)
    rpc.shutdown()
    for stream in streams:
        with pytest.raises(UsageError, match="closed by rpc.shutdown"):
            next(stream)
    return list(s.closed)


_OPEN: dict[str, Callable[..., Iterator[int] | AsyncIterator[int]]] = {
    "sync": s.noting,
    "async": s.noting_async,
    "never": s.never,
}


@pytest.mark.one_transport
def test_shutdown_closes_open_streams(env: dict[str, str]) -> None:
    assert set(run_workers(_shut_down_with_open_streams, 2, env=env)[1]) == set(_OPEN)


def _close_two() -> None:
    for function in (s.slow_to_close, s.slow_to_close_async):
        with rpc.stream("worker1", function, (function.__name__,), window=1) as stream:
            assert next(stream) == 0


def _begins_to_close() -> int:
    return sum(what == "is closing" for _, what in s.produced)


def _close_all_again() -> bool:
    """What a shutdown does."""
    streams = current_agent().served_streams
    threads = streams._threads
    streams.close()
    done = threading.Event()
    threads.submit(done.set)  # behind the tasks that close them
    assert done.wait(30)
    wait_until(lambda: not threads.requests)
    return streams.are_closing


def _are_closing() -> bool:
    return current_agent().served_streams.are_closing


@pytest.mark.one_transport
def test_shutdown_waits_for_generators_that_are_closing_already(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _close_two)
        wait_until(lambda: c.run(1, _begins_to_close) == 2)
        assert c.run(1, _close_all_again)
        c.run(1, s.open_gate)
        wait_until(lambda: not c.run(1, _are_closing))
        assert sorted(c.run(1, s.all_closed)) == ["slow_to_close", "slow_to_close_async"]


def _close_those_that_fail() -> None:
    for function in (s.fails_to_close, s.fails_to_close_async):
        with rpc.stream("worker1", function, window=1) as stream:
            assert next(stream) == 0


@pytest.mark.one_transport
def test_generators_whose_close_raises_are_not_kept(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _close_those_that_fail)
        wait_until(lambda: c.run(1, _served) == 0)
        assert not c.run(1, _are_closing)


def _reach_for_streams_of_others() -> None:
    agent = current_agent()
    for number in range(1, 5):
        future = Future()
        agent.call_async("worker1", Method.STREAM_PULL, (number, 0, 100), {}, 10.0, future)
        assert future.wait() is None, "it is not this worker's"
        agent.call_sync("worker1", Method.STREAM_CLOSE, (number,), {}, 10.0)


def _goes_on() -> list[int]:
    return [next(stream) for stream in s.kept]


@pytest.mark.one_transport
def test_nobody_else_can_pull_or_close(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, _keep_one)
        c.run(2, _reach_for_streams_of_others)
        assert c.run(0, _goes_on) == [1]


def _keep_one() -> None:
    s.kept = [rpc.stream("worker1", s.noting, ("kept",), window=2)]
    assert next(s.kept[0]) == 0
