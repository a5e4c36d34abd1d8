"""Interrupts programs at their points, one at a time, and checks after each interrupt that nothing is broken or left.

``sweep`` drives the workers; everything behind it runs in them.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop import locks
from farprop.runtime.agent_registry import current_agent, is_agent_set
from farprop.runtime.autograd import context_cleanup
from tests.interrupts.points import Interrupts, Point
from tests.interrupts.programs import PROGRAMS, Box, numbers, same
from tests.references.looking import counts
from tests.support.workers import Cluster, processes

_CLEAN_RUNS = 3
_STUCK_SECONDS = 15
_EMPTY_SECONDS = 4.0

_made_locks: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass
class Result:
    """What a sweep of one program found."""

    opcodes: int = 0  # of one run
    points: int = 0
    tried: int = 0  # points that the run came to again
    failures: list[str] = field(default_factory=list)

    def add(self, other: Result) -> None:
        self.opcodes += other.opcodes
        self.points += other.points
        self.tried += other.tried
        self.failures += other.failures

    def __str__(self) -> str:
        return f"{self.opcodes} opcodes, {self.points} points, {self.tried} tried, {len(self.failures)} failed"


class Jobs:
    """A job of two workers to interrupt; another one after each failure. At the end both workers shut down in time."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._job: Cluster | None = None

    def job(self) -> Cluster:
        if self._job is None:
            self._job = self._stack.enter_context(processes(2, timeout=280, check=False))
            _both(self._job, begin)
        return self._job

    def discard(self) -> None:
        """Something is broken in the job, and was reported."""
        if self._job is not None:
            for rank in range(2):
                self._job.kill(rank)
            self._job = None
            self._stack.close()

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._job is not None and kind is None:
                _both(self._job, end)
        except BaseException:
            self.discard()
            raise
        finally:
            self._stack.close()


def sweep(jobs: Jobs, name: str, every: int = 1, offset: int = 0) -> Result:
    """Interrupt a program at every ``every``-th of its points, beginning with the ``offset``-th."""
    result = Result()
    result.opcodes, points = jobs.job().run(0, find_points, name)
    result.points = len(points)
    todo = points[offset % every :: every]
    while todo:
        done, tried, failure = jobs.job().run(0, interrupt_at_each, name, todo)
        result.tried += tried
        todo = todo[done:]
        if failure is not None:
            result.failures.append(f"{name}: {failure}")
            jobs.discard()
    return result


def sweep_shutdown(every: int = 1, offset: int = 0) -> Result:
    """Interrupt ``shutdown`` of worker0 while worker1 shuts down, too. Both must end, whatever happens to worker0."""
    result = Result()
    todo: Sequence[Point] | None = None
    while todo is None or todo:
        with processes(2, timeout=60, check=False) as job:
            if todo is None:
                found: dict[Point, None] = {}
                for _ in range(_CLEAN_RUNS):
                    opcodes, points, _, _ = _shut_down(job, None)
                    found.update(dict.fromkeys(points))
                    result.opcodes = max(result.opcodes, opcodes)
                result.points = len(found)
                todo = list(found)[offset % every :: every]
            while todo:
                point, todo = todo[0], todo[1:]
                _, _, fired, failure = _shut_down(job, point)
                result.tried += fired
                if failure:
                    result.failures.append(f"shutdown: {point}\n  {failure}")
                    for rank in range(2):
                        job.kill(rank)
                    break
    return result


def _shut_down(job: Cluster, point: Point | None) -> tuple[int, list[Point], bool, str]:
    _both(job, begin)
    job.run(0, _use_everything)
    ends = [job.start(0, interrupted_shutdown, point), job.start(1, bounded_shutdown)]
    opcodes, points, fired, failure = ends[0].result()
    other = ends[1].result()
    return opcodes, points, fired, " ".join(filter(None, (failure, other and f"worker1: {other}")))


def _both(job: Cluster, function: Any) -> None:
    for handle in [job.start(rank, function, rank) for rank in range(2)]:
        handle.result()


# In the workers


class Stuck(BaseException):
    """Something takes far too long."""


def begin(rank: int) -> None:
    """Join the job, and note all locks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.unfreeze()
    _made_locks.clear()
    locks.factory = _noted_lock
    context_cleanup._RIDE_SECONDS = 0.001  # otherwise most of the time is spent waiting for the end of contexts
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    gc.freeze()  # later collections look only at what the programs made


def end(rank: int) -> None:
    rpc.shutdown(timeout=3)


def interrupted_shutdown(point: Point | None) -> tuple[int, list[Point], bool, str]:
    """Shut down, interrupted at this point; then shut down again, if that is not done."""
    interrupts = Interrupts(point)
    failure = ""
    try:
        with _not_stuck():
            try:
                with interrupts():
                    rpc.shutdown(timeout=3)
            except (KeyboardInterrupt, RuntimeError) as error:
                if not interrupts.fired:
                    failure = f"raised {error!r}"
            if is_agent_set():
                with suppress(RuntimeError):
                    rpc.shutdown(timeout=3)
            failure = failure or _threads_left()
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
    if failure:
        failure = f"raised at {interrupts.delivered or 'nowhere'}\n  {failure}"
    return interrupts.opcodes, list(interrupts.points), interrupts.fired, failure


def bounded_shutdown() -> str:
    """Shut down beside a worker that may be interrupted, and leave in time."""
    try:
        with _not_stuck():
            with suppress(RuntimeError):
                rpc.shutdown(timeout=3)
            return _threads_left()
    except Stuck as error:
        return str(error)


def _threads_left() -> str:
    deadline = time.monotonic() + _EMPTY_SECONDS
    while left := [thread.name for thread in threading.enumerate() if thread.name.startswith("farprop")]:
        if time.monotonic() > deadline:
            return f"threads are left: {left}"
        time.sleep(0.001)
    return "the agent is left" if is_agent_set() else ""


def _noted_lock(name: str) -> Any:
    lock = threading.RLock() if name == "references" else threading.Lock()
    _made_locks.add(lock)
    return lock


def find_points(name: str) -> tuple[int, list[Point]]:
    """How many opcodes a run of the program has, and all points in them."""
    found: dict[Point, None] = {}
    opcodes = 0
    for run in range(_CLEAN_RUNS + 1):
        operation = PROGRAMS[name]()
        with Interrupts()() as interrupts:
            operation()
        if run:  # the first run imports and dials
            found.update(interrupts.points)
            opcodes = max(opcodes, interrupts.opcodes)
        del operation
        _check(name)
    return opcodes, list(found)


def interrupt_at_each(name: str, points: Sequence[Point]) -> tuple[int, int, str | None]:
    """Interrupt the program at each of these points, up to the first failure.

    Returns:
        How many points were done, how many of them the program came to, and what failed.
    """
    tried = 0
    for number, point in enumerate(points):
        interrupts = Interrupts(point)
        raised = None
        try:
            with _not_stuck():
                raised = _interrupt(name, interrupts)
                tried += interrupts.fired
                _check(name)
        except BaseException as error:
            shown = "".join(traceback.format_exception_only(error)).strip()
            where = interrupts.delivered or "nowhere"
            place = traceback.extract_tb(error.__traceback__)[-4:]
            failed = " < ".join(
                f"{entry.filename.rsplit('/', 1)[-1]}:{entry.lineno} {entry.name}" for entry in reversed(place)
            )
            return number + 1, tried, f"{point}\n  raised at {where}, {raised or 'swallowed'}\n  {shown}\n  in {failed}"
    return len(points), tried, None


def _interrupt(name: str, interrupts: Interrupts) -> str | None:
    operation = PROGRAMS[name]()
    try:
        with interrupts():
            operation()
    except BaseException as error:
        if isinstance(error, Stuck) or not interrupts.fired:
            raise
        return type(error).__name__
    return None


@contextmanager
def _not_stuck() -> Iterator[None]:
    def stop(_: int, frame: FrameType | None) -> None:
        faulthandler.dump_traceback()
        raise Stuck("".join(traceback.format_stack(frame)[-5:]))

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _STUCK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _check(name: str) -> None:
    """Everything works, and nothing is left."""
    _use_everything()
    gc.collect()
    deadline = time.monotonic() + _EMPTY_SECONDS
    while left := _left():
        if time.monotonic() > deadline:
            raise AssertionError(f"left after {_EMPTY_SECONDS:g} s: {left}")
        time.sleep(0.001)
    agent = current_agent()
    for connection in list(agent.peers.connections.values()):
        connection.validate()
    agent._loop._timers.validate()
    references = agent.references
    references._guard.locked(references._machine.validate)
    held = [lock for lock in _locks() if not _is_free(lock)]
    assert not held, f"locks are held: {held}"


def _use_everything() -> None:
    x = torch.ones(2, requires_grad=True)
    with dist_autograd.context() as context_id:
        loss = rpc.rpc_sync("worker1", torch.mul, args=(x, 3), timeout=10).sum()
        dist_autograd.backward(context_id, [loss], timeout=10)
        gradients = dist_autograd.get_gradients(context_id)
    assert [gradient.tolist() for gradient in gradients.values()] == [[3.0, 3.0]]
    rref = rpc.remote("worker1", Box, args=(7,), timeout=10)
    assert rpc.rpc_async("worker1", same, args=(8,), timeout=10).wait() == 8
    assert rref.rpc_sync(timeout=10).get() == 7
    assert rpc.rpc_sync("worker0", same, args=(9,), timeout=10) == 9
    assert list(rpc.stream("worker1", numbers, args=(3,), timeout=10)) == [0, 1, 2]


def _left() -> dict[str, Any]:
    own = _own_state()
    theirs = rpc.rpc_sync("worker1", _own_state, timeout=10)
    # The question itself is an open request there.
    theirs.pop("requests")
    both = {"worker0": own, "worker1": theirs}
    return {worker: left for worker, state in both.items() if (left := {key: n for key, n in state.items() if n})}


def _own_state() -> dict[str, int]:
    agent = current_agent()
    state = {**counts(), **agent.gradients.debug_info()}
    state["open calls"] = agent.peers.open_calls
    state["requests"] = agent._server.active
    state["ended contexts"] = not agent.context_cleanup.ended.is_empty
    state["references to settle"] = not agent.references.settled
    state["waiters"] = len(agent.gradients._waiters)
    state["streams"] = len(agent.streams) + len(agent.served_streams)
    state["parcels"] = not agent.parcels.is_empty
    return state


def _locks() -> list[Any]:
    kinds = (type(threading.Lock()), type(threading.RLock()))
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("farprop")]
    shared = [value for module in modules for value in vars(module).values() if isinstance(value, kinds)]
    return [*shared, *_made_locks]


def _is_free(lock: Any) -> bool:
    if getattr(lock, "_is_owned", bool)() or not lock.acquire(timeout=2):
        return False
    lock.release()
    return True
