"""Regression tests, one for each fixed bug."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.support.workers import cluster, run_workers


def _keep_arrays() -> list[float]:
    kept = [rpc.rpc_sync("worker1", f.identity, args=(np.full(100_000, float(i)),)) for i in range(5)]
    return [float(array.sum()) for array in kept]


def test_kept_numpy_arrays_do_not_change(env: dict[str, str]) -> None:
    """NumPy makes its own view of a buffer and drops ours, so the segment was returned while it was in use."""
    with cluster(2, env) as c:
        assert c.run(0, _keep_arrays) == [i * 1e5 for i in range(5)]


def _drop_tensors_after_shutdown(rank: int, directory: str) -> int:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    tensors = [rpc.rpc_sync(f"worker{1 - rank}", torch.zeros, args=(5_000_000,)) for _ in range(2)]
    rpc.shutdown()
    files = [os.open(Path(directory, f"{rank}-{i}"), os.O_RDWR | os.O_CREAT) for i in range(40)]
    tensors.clear()
    sizes = [os.fstat(file).st_size for file in files]
    for file in files:
        os.close(file)
    return sum(sizes)


def test_dropping_tensors_after_shutdown_writes_to_no_file(tmp_path: Path) -> None:
    assert run_workers(_drop_tensors_after_shutdown, 2, (str(tmp_path),)) == [0, 0]


_event = threading.Event()


def _nested_then_wait() -> bool:
    rpc.rpc_sync("worker0", f.sleep, args=(0.2,))  # longer than the watcher stays awake
    return _event.wait(20)


def _set_event() -> None:
    _event.set()


def _stall_after_a_nested_call() -> bool:
    # A lambda has no name, so the worker does not remember that it is slow.
    waiting = rpc.rpc_async("worker1", lambda: _nested_then_wait())
    time.sleep(0.5)  # until it has made its call and waits; no event here tells when
    rpc.rpc_sync("worker1", _set_event)
    return bool(waiting.wait())


def test_a_function_that_waits_after_a_nested_call_does_not_block_the_worker() -> None:
    with cluster(2) as c:
        c.run(0, rpc.rpc_sync, "worker1", f.noop)
        c.run(1, rpc.rpc_sync, "worker0", f.noop)
        assert c.run(0, _stall_after_a_nested_call)


def _interrupt_often() -> int:
    interrupts = 0
    end = time.monotonic() + 3
    while time.monotonic() < end:
        with contextlib.suppress(KeyboardInterrupt):  # an interrupt at the end of the inner block
            try:
                signal.signal(signal.SIGALRM, _raise_interrupt)
                # Repeatedly: Python swallows an interrupt that arrives while a finaliser runs.
                signal.setitimer(signal.ITIMER_REAL, 0.0003 + (interrupts % 17) * 0.00005, 0.01)
                while True:
                    rpc.rpc_sync("worker1", f.noop, timeout=20)
            except KeyboardInterrupt:
                interrupts += 1
            finally:
                signal.signal(signal.SIGALRM, signal.SIG_IGN)
                signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert rpc.rpc_sync("worker1", f.add, args=(1,), timeout=20) == 2
    current_agent().peers.connect("worker1").validate()
    return interrupts


def _raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_calls_work_after_interrupts_at_any_line(env: dict[str, str]) -> None:
    with cluster(2, env, check=False) as c:
        assert c.run(0, _interrupt_often) > 50


def _dial_a_stopped_worker() -> float:
    began = time.monotonic()
    errors: list[BaseException] = []

    def call() -> None:
        try:
            rpc.rpc_sync("worker1", f.noop, timeout=0.5)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [RpcTimeoutError] * 3
    return time.monotonic() - began


def test_dialling_a_stopped_worker_ends_at_the_calls_deadline(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.signal(1, signal.SIGSTOP)
        try:
            assert c.run(0, _dial_a_stopped_worker) < 15
        finally:
            c.signal(1, signal.SIGCONT)


class NoRepr(Exception):
    def __repr__(self) -> str:
        raise ZeroDivisionError

    __str__ = __repr__


def _raise_no_repr() -> None:
    raise NoRepr


def _raise_large() -> None:
    raise ValueError("x" * (5 << 20))


def _odd_exceptions() -> None:
    with pytest.raises((NoRepr, RuntimeError)):
        rpc.rpc_sync("worker1", _raise_no_repr, timeout=20)
    with pytest.raises(RuntimeError, match="too large to be sent"):
        rpc.rpc_sync("worker1", _raise_large, timeout=20)


def test_exceptions_without_repr_or_with_huge_text_are_answered() -> None:
    with cluster(2) as c:
        c.run(0, _odd_exceptions)


def _fill_a_small_pool() -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for i in range(60):
                tensor = torch.full((20_000 + 1000 * (number + i) % 9,), float(number))
                assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(tensor,), timeout=30), tensor)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@pytest.mark.one_transport
def test_many_threads_can_drop_segments_at_once() -> None:
    with cluster(2, {"FARPROP_SHM_POOL_BYTES": "300000"}) as c:
        c.run(0, _fill_a_small_pool)


def _odd_timeouts() -> None:
    waiting = rpc.rpc_async("worker1", f.wait_for_gate)
    for timeout in (1e9, float("inf")):
        assert rpc.rpc_sync("worker1", f.add, args=(1,), timeout=timeout) == 2
    for timeout in (-0.5, -2, float("nan")):
        with pytest.raises(ValueError, match="A timeout is 0"):
            rpc.rpc_sync("worker1", f.noop, timeout=timeout)
        with pytest.raises(ValueError, match="A timeout is 0"):
            rpc.rpc_async("worker1", f.noop, timeout=timeout)
    rpc.rpc_sync("worker1", f.open_gate)
    assert waiting.wait() == "through"


def test_odd_timeouts() -> None:
    with cluster(2) as c:
        c.run(0, _odd_timeouts)


def _callback_that_calls_late(rank: int) -> list[str]:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 0:

        def late(_: Any) -> None:
            time.sleep(0.3)
            rpc.rpc_sync("worker1", f.note, args=("from a callback",))

        rpc.rpc_async("worker1", f.noop).then(late)
    rpc.shutdown()
    return list(f.ran)


def test_graceful_shutdown_waits_for_callbacks() -> None:
    assert run_workers(_callback_that_calls_late, 2) == [[], ["from a callback"]]


def _hold_many() -> tuple[int, int]:
    held = [rpc.rpc_sync("worker1", torch.zeros, args=(20_000,)) for _ in range(300)]
    there = rpc.rpc_sync("worker1", _open_files)
    assert len(held) == 300
    return _open_files(), there


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_received_tensors_keep_no_file_descriptors() -> None:
    with cluster(2) as c:
        here, there = c.run(0, _hold_many)
        assert here < 100
        assert there < 100


def _out_of_descriptors(place: str) -> float:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_open_files() + 5, hard))
    taken = []
    try:
        try:
            while True:
                taken.append(os.dup(0))
        except OSError:
            pass
        os.mkdir(f"{place}/full")  # making a directory takes no descriptor
        while not os.path.exists(f"{place}/connected"):
            time.sleep(0.005)
        before = sum(os.times()[:2])
        time.sleep(1.0)
        return sum(os.times()[:2]) - before
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _port() -> int:
    return int(current_agent()._own_entry.tcp[1])


def test_a_worker_out_of_file_descriptors_does_not_spin_and_recovers(tmp_path: Path) -> None:
    with cluster(2) as c:
        port = c.run(0, _port)
        used = c.start(0, _out_of_descriptors, str(tmp_path))
        while not (tmp_path / "full").exists():
            time.sleep(0.005)
        with socket.create_connection(("127.0.0.1", port)):
            (tmp_path / "connected").touch()
            assert used.result(30) < 0.5
        assert c.run(1, rpc.rpc_sync, "worker0", f.add, (1,)) == 2


def _slow_callbacks(place: str) -> int:
    def slow(_: Any) -> None:
        time.sleep(0.002)

    futures = [rpc.rpc_async("worker1", f.wait_for_gate).then(slow) for _ in range(1000)]
    os.mkdir(f"{place}/asked")
    most = 0
    while not all(future.done() for future in futures):
        most = max(most, threading.active_count())
        time.sleep(0.001)
    return most


def test_a_thousand_failing_futures_do_not_make_a_thousand_threads(tmp_path: Path) -> None:
    with cluster(2, options={"num_worker_threads": 4}) as c:
        threads = c.start(0, _slow_callbacks, str(tmp_path))
        while not (tmp_path / "asked").exists():
            time.sleep(0.005)
        c.kill(1)
        assert threads.result() < 200


def _call_then_shut_down(rank: int) -> list[Any]:
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 1:
        f.gate.wait(20)
        rpc.shutdown(graceful=False)
        return []
    for _ in range(200):
        futures = [rpc.rpc_async("worker1", f.add, args=(i,)) for i in range(20)]
        assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2
        assert torch.futures.wait_all(futures) == list(range(1, 21))
    rpc.rpc_sync("worker1", f.open_gate)
    rpc.shutdown(graceful=False)
    return [1]


def test_sync_and_async_calls_share_a_connection() -> None:
    assert run_workers(_call_then_shut_down, 2) == [[1], []]
