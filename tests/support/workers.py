"""Real worker processes: ``run_workers`` for one function on every rank; ``cluster`` for a job to drive, and
``processes`` for one that makes no calls.

Functions go there by reference if they can be imported, by value (cloudpickle) if not. Every worker has the
test's environment, its group's own ``MASTER_ADDR`` and ``MASTER_PORT``, one intra-op thread, and dies with
the test. What workers write is shown when the test fails.
"""

from __future__ import annotations

import importlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.child import Check
from tests.support.worker_group import Environment, Worker, WorkerDied, WorkerGroup, WorkersFailed

__all__ = ["Cluster", "Handle", "WorkerDied", "WorkersFailed", "cluster", "free_port", "processes", "run_workers"]

RPC_MODULE = "farprop.rpc"

# When one worker has failed, the others often fail a moment later, and that is worth showing.
_AFTER_FAILURE = 2.0


def run_workers(
    fn: Callable[..., Any],
    world_size: int = 2,
    args: Sequence[Any] = (),
    env: Environment | Sequence[Environment] | None = None,
    timeout: float = 60,
    check: bool = True,
    full_exit: bool = False,
) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``world_size`` processes and return their results by rank.

    ``WorkersFailed``, an ``AssertionError``, if one of them raises, ends with another exit code than 0, or is
    not gone after ``timeout`` seconds; and, unless ``check=False``, if it leaves a thread, descriptor or
    process behind or an exception ended a thread of it. ``env`` is for all, or a list with one for each rank;
    None as a value removes a variable. ``full_exit=True`` is for tests of how a process ends: it then takes
    its modules apart and runs C++ destructors, which is slow.
    """
    with WorkerGroup(_environs(env, world_size), full_exit) as group:
        calls = [worker.call(fn, (worker.rank, *args)) for worker in group.workers]
        for worker in group.workers:
            worker.finish(Check.UNLESS_RAISED if check else Check.NEVER)

        def failed(worker: Worker) -> bool:
            return worker.ended.done() and bool(_problems(worker, calls[worker.rank]))

        in_time = group.wait(timeout, give_up=lambda: any(map(failed, group.workers)))
        if in_time:
            group.wait(_AFTER_FAILURE)
        stuck = group.running()
        problems = [p for w in group.workers if failed(w) for p in _problems(w, calls[w.rank])]
        if not in_time:
            problems += [f"{w} did not end within {timeout:g} s; it wrote where it was" for w in stuck]
        elif stuck:
            problems += [f"{w} still ran after that; it wrote where it was" for w in stuck]
        if problems:
            group.stop(stuck)
            raise group.failure(problems)
        return [call.result() for call in calls]


@contextmanager
def cluster(
    world_size: int = 2,
    env: Environment | Sequence[Environment] | None = None,
    options: Mapping[str, Any] | None = None,
    timeout: float = 60,
    check: bool = True,
) -> Iterator[Cluster]:
    """A job of workers "worker0", "worker1", ... with farprop initialised; the test says what each runs.

    ``options`` are those of ``TensorPipeRpcBackendOptions``. ``timeout`` holds for the start, for each call
    and for the end. ``check=False`` lets the workers leave things behind.
    """
    with WorkerGroup(_environs(env, world_size)) as group:
        running = Cluster(group, timeout, check)
        running._init(options or {})
        yield running
        # Not after an exception: then the group's exit kills them all, and shows what they wrote.
        running.shutdown(graceful=not running.any_dead())


@contextmanager
def processes(
    world_size: int = 2,
    env: Environment | Sequence[Environment] | None = None,
    timeout: float = 60,
    check: bool = True,
) -> Iterator[Cluster]:
    """As ``cluster``, but without ``init_rpc``: the test starts and stops what each process needs."""
    with WorkerGroup(_environs(env, world_size)) as group:
        running = Cluster(group, timeout, check)
        yield running
        running.shutdown(graceful=False)


class Cluster:
    """A running job."""

    def __init__(self, group: WorkerGroup, timeout: float, check: bool) -> None:
        self._group = group
        self._timeout = timeout
        self._check = Check.ALWAYS if check else Check.NEVER
        self._handles: list[Handle] = []
        self._death_known: set[int] = set()
        self._down = False

    def run(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``fn`` in the process of that rank; its result, or its exception with a traceback as a note."""
        return self.start(rank, fn, *args, **kwargs).result()

    def start(self, rank: int, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Handle:
        """The same without waiting. It runs in the main thread if that is free, else in one of its own."""
        if self._down:
            raise ValueError("this cluster has been shut down")
        worker = self._group.workers[rank]
        handle = Handle(self, worker, worker.call(fn, args, kwargs))
        self._handles.append(handle)
        return handle

    def pid(self, rank: int) -> int:
        """The process of that rank."""
        return self._group.workers[rank].pid

    def signal(self, rank: int, signum: int) -> None:
        """Send that process a signal. After SIGSTOP, return when all of its threads have stopped."""
        self._group.workers[rank].signal(signum)
        deadline = time.monotonic() + self._timeout
        while signum == signal.SIGSTOP and not _is_stopped(self.pid(rank)):
            if time.monotonic() > deadline:
                raise AssertionError(f"worker{rank} does not stop")
            time.sleep(0.001)

    def kill(self, rank: int) -> None:
        """Kill that process, and wait until it is gone."""
        self._death_known.add(rank)
        self.signal(rank, signal.SIGKILL)
        self.wait(rank)

    def wait(self, rank: int) -> int | None:
        """Wait until that process has ended by itself, and return its exit code (-N for signal N)."""
        worker = self._group.workers[rank]
        self._death_known.add(rank)
        self._within_timeout([worker.ended], f"the end of {worker}")
        return worker.ended.result()

    def any_dead(self) -> bool:
        """Whether a process has ended already."""
        return len(self._group.running()) < len(self._group.workers)

    def shutdown(self, graceful: bool = True) -> None:
        """Shut farprop down in all live workers, let them check themselves and exit. Later calls do nothing.

        Raises if that fails or takes too long, if a worker has died and the test does not know of it, or if a
        call that was started has raised and nobody looked.
        """
        if self._down:
            return
        self._down = True
        # A worker that was killed by SIGKILL was killed by the test.
        problems = [
            f"{w} {w.how_it_ended()}"
            for w in self._group.workers
            if w.ended.done() and w.rank not in self._death_known and w.ended.result() != -signal.SIGKILL
        ]
        living = self._group.running()
        ends = [w.call(_shutdown_rpc, (RPC_MODULE, graceful)) for w in living]
        self._within_timeout(ends, "shutdown")
        for worker in living:
            worker.finish(self._check)
        self._within_timeout([w.ended for w in living], "the processes to end")
        for worker, end in zip(living, ends, strict=True):
            problems += _problems(worker, end)
        problems += [p for handle in self._handles for p in handle._unseen()]
        if problems:
            raise self._group.failure(problems)

    def _init(self, options: Mapping[str, Any]) -> None:
        size = len(self._group.workers)
        starts = [w.call(_init_rpc, (RPC_MODULE, w.name, w.rank, size, dict(options))) for w in self._group.workers]
        self._within_timeout(starts, "init_rpc")
        problems = [
            p
            for worker, start in zip(self._group.workers, starts, strict=True)
            if start.exception()
            for p in _problems(worker, start)
        ]
        if problems:
            raise self._group.failure(problems)

    def _within_timeout(self, futures: Sequence[Future[Any]], what: str) -> None:
        if wait(futures, self._timeout).not_done:
            stuck = self._group.running()
            self._group.stop(stuck)
            raise self._group.failure(
                [
                    f"waited {self._timeout:g} s for {what}; "
                    "each worker that still ran wrote where it was and has been stopped"
                ]
            )


class Handle:
    """A call in a worker."""

    def __init__(self, owner: Cluster, worker: Worker, future: Future[Any]) -> None:
        self._owner = owner
        self._worker = worker
        self._future = future
        self._seen = False

    def done(self) -> bool:
        """Whether it has ended."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        """What the function returned, or its exception.

        ``TimeoutError`` after ``timeout`` seconds. Without one the cluster's timeout holds, and reaching it
        fails the test with the stacks of all workers.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What the function raised, or None; waits as ``result`` does."""
        if timeout is None:
            self._owner._within_timeout([self._future], f"a call in {self._worker}")
        elif wait([self._future], timeout).not_done:
            raise TimeoutError(f"a call in {self._worker} was not done after {timeout:g} s")
        self._seen = True
        error = self._future.exception()
        if isinstance(error, WorkerDied):
            self._owner._death_known.add(self._worker.rank)
        return error

    def _unseen(self) -> list[str]:
        error = self._future.exception()
        if self._seen or error is None or isinstance(error, WorkerDied):
            return []
        return [f"a call in {self._worker} raised, and the test did not look: {_explain(error)}"]


def free_port() -> int:
    """A TCP port that nobody uses, outside of the range from which the kernel takes ports for connections."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as text:
        end = int(text.read().split()[0])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        # At random, because other test runs on this machine choose too. The system's source: a seed set by
        # a test must not make it choose the port of the test before.
        port = random.SystemRandom().randrange(10_000, max(end, 20_000))
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", port))
            except OSError:
                continue
        return port
    raise AssertionError("no free port found")


def _environs(env: Environment | Sequence[Environment] | None, world_size: int) -> list[dict[str, str]]:
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    each = [env or {}] * world_size if env is None or isinstance(env, Mapping) else list(env)
    if len(each) != world_size:
        raise ValueError(f"env has {len(each)} entries for {world_size} workers")
    merged = ({**os.environ, **shared, **own} for own in each)
    return [{name: value for name, value in one.items() if value is not None} for one in merged]


def _problems(worker: Worker, call: Future[Any]) -> list[str]:
    """What went wrong in a worker that was to run this call and then end."""
    error = call.exception()
    if isinstance(error, WorkerDied):
        return [str(error)]
    if error is not None:
        return [f"{worker} raised {_explain(error)}"]
    problems = [f"{worker}: {text}" for text in worker.complaints.result()]
    if worker.ended.result() != 0:
        problems.append(f"{worker} did its work, but then {worker.how_it_ended()}")
    return problems


def _explain(error: BaseException) -> str:
    notes = "\n".join(getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}\n{notes}".rstrip()


# What runs in the workers. The module's name is an argument: a constant that was changed here would not be
# changed there.


def _init_rpc(module: str, name: str, rank: int, world_size: int, options: dict[str, Any]) -> None:
    rpc = importlib.import_module(module)
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=rpc.TensorPipeRpcBackendOptions(**options))


def _shutdown_rpc(module: str, graceful: bool) -> None:
    if module not in sys.modules:
        return  # the test makes no calls
    rpc = importlib.import_module(module)
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return  # the test has shut it down already
    rpc.shutdown(graceful=graceful)


def _is_stopped(pid: int) -> bool:
    """Whether no thread of a process runs any more."""
    try:
        states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return False  # a thread has just ended
    return all(state in "TtZX" for state in states)
