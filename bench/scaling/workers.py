"""Workers that are forks of one process that has imported torch: 64 of them start soon, and fit into memory."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from bench.cases import Api
from bench.cases.calls import noop
from bench.channel import die_with_parent
from bench.driver import BenchError, free_port

# Torch answers slowly with many workers on few cores. It still has to answer.
PATIENCE = 120.0
STOP_SECONDS = 20.0
CALL_SECONDS = 100.0
NUM_WORKER_THREADS = 4


class Workers:
    """A job of one package. Its workers have imported the package, and wait for `begin`."""

    def __init__(self, package: str, size: int) -> None:
        port = free_port()
        fork = mp.get_context("fork")
        self._ends: list[Connection] = []
        self._processes: list[BaseProcess] = []
        for rank in range(size):
            ours, theirs = fork.Pipe()
            process = fork.Process(target=_work, args=(package, rank, size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)
        self._answers(self._ends)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def begin(self) -> float:
        """Start all workers; return the seconds until the last one was ready."""
        began = time.monotonic()
        self.all("init")
        return time.monotonic() - began

    def first(self, what: str, *args: object) -> Any:
        """Have worker 0 do something."""
        self._ends[0].send((what, args))
        return self._answers(self._ends[:1])[0]

    def all(self, what: str, *args: object) -> list[Any]:
        """Have all workers do something at the same time."""
        for end in self._ends:
            end.send((what, args))
        return self._answers(self._ends)

    def stop(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.send(("stop", ()))
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for end in self._ends:
            end.close()

    def _answers(self, ends: list[Connection]) -> list[Any]:
        deadline = time.monotonic() + PATIENCE
        answers = []
        for end in ends:
            if not end.poll(max(0.0, deadline - time.monotonic())):
                raise BenchError(f"a worker did not answer in {PATIENCE:.0f} s")
            try:
                answer = end.recv()
            except EOFError:
                raise BenchError("a worker ended") from None
            if isinstance(answer, Exception):
                raise BenchError(f"{type(answer).__name__}: {answer}")
            answers.append(answer)
        return answers


@contextlib.contextmanager
def idle_fork() -> Iterator[int]:
    """A fork of this process that does nothing: what a worker has beyond it, the worker made."""
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        signal.pause()
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _work(package: str, rank: int, size: int, port: int, commands: Connection) -> None:
    die_with_parent()
    _close_inherited(commands.fileno())
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")  # torch's own shutdown warns about itself
    worker = _Worker(Api(package), rank, size, port)
    commands.send("imported")
    while True:
        what, args = commands.recv()
        if what == "stop":
            worker.api.rpc.shutdown()
            return
        try:
            commands.send(getattr(worker, what)(*args))
        except Exception as error:
            commands.send(BenchError(f"worker {rank}: {type(error).__name__}: {error}"))


def _close_inherited(own: int) -> None:
    """Close the pipes to workers that were forked before."""
    os.closerange(3, own)
    os.closerange(own + 1, os.sysconf("SC_OPEN_MAX"))


class _Worker:
    """What a worker does on command. Times are in µs."""

    def __init__(self, api: Api, rank: int, size: int, port: int) -> None:
        self.api = api
        self._rank, self._size, self._port = rank, size, port
        self._others = [f"w{other}" for other in range(size) if other != rank]
        self._rpc_sync: Callable[..., Any] = api.rpc.rpc_sync  # imported before the start is timed

    def init(self) -> None:
        rpc = self.api.rpc
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=NUM_WORKER_THREADS,
            rpc_timeout=CALL_SECONDS,
            init_method=f"tcp://127.0.0.1:{self._port}",
        )
        rpc.init_rpc(f"w{self._rank}", rank=self._rank, world_size=self._size, rpc_backend_options=options)

    def round_robin(self, seconds: float) -> list[float]:
        """Call the others in turn for so long, at least each of them once after one call that connects."""
        for other in self._others:
            self._rpc_sync(other, noop)
        taken: list[float] = []
        end = time.perf_counter() + seconds
        while not taken or time.perf_counter() < end:
            taken += [self._call(other) for other in self._others]
        return taken

    def ring(self, count: int) -> list[float]:
        """Call the next worker, so often."""
        following = f"w{(self._rank + 1) % self._size}"
        self._rpc_sync(following, noop)
        return [self._call(following) for _ in range(count)]

    def all_to_all(self, rounds: int) -> float:
        """Call all others at once, so often; return the time of all rounds."""
        rpc_async = self.api.rpc.rpc_async
        began = time.perf_counter()
        for _ in range(rounds):
            torch.futures.wait_all([rpc_async(other, noop) for other in self._others])
        return (time.perf_counter() - began) * 1e6

    def _call(self, other: str) -> float:
        began = time.perf_counter()
        self._rpc_sync(other, noop)
        return (time.perf_counter() - began) * 1e6
