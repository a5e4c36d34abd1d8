"""The thread that waits for a future reads its answer, and everything that can go wrong with that."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RpcTimeoutError
from farprop.runtime.answer_reader import Waiter
from farprop.runtime.client_connection import ClientConnection
from tests.calls import functions as f
from tests.support.workers import cluster


def _readers_of_waits(count: int) -> list[bool]:
    """For each wait, whether this thread itself read an answer."""
    reads: list[int] = []
    read_for = ClientConnection._read_for

    def noting(self: ClientConnection, waiter: Waiter, deadline: float | None) -> None:
        reads.append(threading.get_ident())
        read_for(self, waiter, deadline)

    ClientConnection._read_for = noting  # type: ignore[method-assign]
    try:
        own = []
        for number in range(count):
            reads.clear()
            future = rpc.rpc_async("worker1", f.sleep, args=(0.01,))
            future.wait()
            own.append(threading.get_ident() in reads)
            assert future.done(), number
        return own
    finally:
        ClientConnection._read_for = read_for  # type: ignore[method-assign]


def test_waiting_thread_reads_the_answer_itself(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        assert all(c.run(0, _readers_of_waits, 10))


def _in_a_thread_of_its_own() -> str:
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(_callback_that_waits_for_the_waiting_thread()))
    thread.start()
    thread.join(30)
    return results[0]


def _callback_that_waits_for_the_waiting_thread() -> str:
    go_on = threading.Event()
    threads: list[int] = []

    def callback(future: torch.futures.Future[str]) -> str:
        threads.append(threading.get_ident())
        assert go_on.wait(20)
        return future.value() + "!"

    future = rpc.rpc_async("worker1", f.wait_for_gate)
    derived = future.then(callback)
    rpc.rpc_sync("worker1", f.open_gate)
    assert future.wait() == "through"
    go_on.set()
    assert derived.wait() == "through!"
    return "own" if threading.get_ident() in threads else "pool"


def test_callbacks_don_t_run_on_the_waiting_thread(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        assert c.run(0, _in_a_thread_of_its_own) == "pool"


def _several_threads_wait_for_one_future() -> list[str]:
    future = rpc.rpc_async("worker1", f.wait_for_gate)
    values: list[str] = []
    threads = [threading.Thread(target=lambda: values.append(future.wait())) for _ in range(5)]
    for thread in threads:
        thread.start()
    rpc.rpc_sync("worker1", f.open_gate)
    for thread in threads:
        thread.join(20)
    return values


def test_several_threads_wait_for_one_future(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        assert c.run(0, _several_threads_wait_for_one_future) == ["through"] * 5


def _many_futures_in_any_order() -> bool:
    futures = [rpc.rpc_async(f"worker{1 + number % 2}", f.add, args=(number, 1)) for number in range(200)]
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0)).tolist()
    return all(futures[number].wait() == number + 1 for number in order)


def test_futures_are_waited_for_in_any_order(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        assert c.run(0, _many_futures_in_any_order)


def _errors() -> list[str]:
    said = []
    for future in (
        rpc.rpc_async("worker1", f.raise_value_error, args=("no",)),
        rpc.rpc_async("worker1", f.wait_for_gate, timeout=0.2),
    ):
        for _ in range(2):  # every wait raises
            try:
                future.wait()
            except Exception as error:
                said.append(type(error).__name__)
    rpc.rpc_sync("worker1", f.open_gate)
    return said


def test_errors_and_deadlines_are_raised_by_the_waiting_thread(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        assert c.run(0, _errors) == ["ValueError"] * 2 + [RpcTimeoutError.__name__] * 2


def _wait_for_the_dying() -> str:
    try:
        rpc.rpc_async("worker1", f.die).wait()
    except ConnectionLostError as error:
        return type(error).__name__
    return "no error"


def test_wait_ends_when_the_worker_dies(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        assert c.run(0, _wait_for_the_dying) == "ConnectionLostError"
        assert c.wait(1) == 9


def _interrupted_wait() -> list[object]:
    interrupted: list[bool] = []
    previous = signal.signal(signal.SIGINT, lambda *_: interrupted.append(True))
    future = rpc.rpc_async("worker1", f.interrupt_and_wait_for_gate, args=(os.getpid(),))
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupted:  # on a busy machine, before there was anything to interrupt
            signal.raise_signal(signal.SIGINT)
        future.wait()
        raise AssertionError("there was no interrupt")
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, previous)
    # The connection is whole: the interrupt came while nothing was read. The future is completed all the same.
    rpc.rpc_sync("worker1", f.open_gate)
    deadline = time.monotonic() + 20
    while not future.done() and time.monotonic() < deadline:
        rpc.rpc_sync("worker1", f.noop)
    return [future.wait(), rpc.rpc_async("worker1", f.add, args=(1, 1)).wait()]


def test_interrupted_wait_leaves_the_future_and_the_connection_usable(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        assert c.run(0, _interrupted_wait) == ["through", 2]


def _nested(depth: int) -> int:
    """Waits for a future on a thread of the pool, whose answer needs this worker again."""
    if not depth:
        return 0
    other = "worker1" if rpc.get_worker_info().name == "worker0" else "worker0"
    return 1 + rpc.rpc_async(other, _nested, args=(depth - 1,)).wait()


@pytest.mark.parametrize("threads", [1, 4])
def test_waits_inside_of_called_functions_use_up_no_thread(env: dict[str, str], threads: int) -> None:
    with cluster(2, env, options={"num_worker_threads": threads}) as c:
        assert c.run(0, _nested, 30) == 30
