"""A pool of workers that a program has started: calls to each of them, and ``map`` over all.

The program that starts the pool is a worker, too: ``driver``, rank 0. A subclass starts and ends the processes of the
others: see ``WorkerPool``.
"""

from __future__ import annotations

import atexit
import itertools
import operator
import os
import queue
import secrets
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, FarpropError, RendezvousError, UsageError
from farprop.launch import spec, tasks
from farprop.launch.progress import progress_bar
from farprop.launch.spec import DRIVER, WorkerSpec, enter
from farprop.rpc import RRef
from farprop.runtime import agent_registry
from farprop.runtime.agent import Agent
from farprop.runtime.futures import Future
from farprop.wire.message import SYSTEM

_Self = TypeVar("_Self", bound="WorkerPool")

_LOOK_SECONDS = 0.02  # between two looks at who has joined
_INTERRUPT_SECONDS = 5.0  # that a worker has to confirm an interrupt
_END_SECONDS = 1.0  # and the end of the pool
_numbers = itertools.count(1)  # of tasks


class Worker:
    """A worker of a pool, as its driver sees it.

    Args:
        pool: its pool.
        name: its name in the job.

    Attributes:
        name: its name in the job. ``farprop.rpc`` knows it by that name, too.
    """

    def __init__(self, pool: WorkerPool, name: str) -> None:
        self.name = name
        self._pool = pool

    def __repr__(self) -> str:
        return f"<Worker {self.name}>"

    def __reduce__(self) -> Any:
        raise UsageError(f"{self!r} belongs to the driver. Send its name, and use farprop.rpc on the other worker.")

    def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)`` on this worker, and wait for its result.

        There is no time limit. An interrupt (Ctrl-C, or that of a notebook's cell) is raised at once, and the function
        gets ``KeyboardInterrupt`` as soon as it runs Python again.

        Args:
            function: The function. What is defined in ``__main__`` or in a notebook's cell travels by value.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            What it returned.

        Raises:
            ConnectionLostError: The worker has died.
            UsageError: The pool does not run.
            Exception: What the function raised.

        Example:
            ``y = w[0].call(torch.add, a, b)``
        """
        number = next(_numbers)
        try:
            return rpc.rpc_sync(self.name, self._task(number, function), args, kwargs, timeout=0)
        except Exception:
            raise
        except BaseException:
            self._interrupt(number)
            raise
        finally:
            self._pool._on_answered()

    def call_async(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """Run ``function(*args, **kwargs)`` on this worker, and return a future of its result at once.

        An interrupt while the program waits for the future does not interrupt the function.

        Args:
            function: As for :meth:`call`.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            A future of the result.

        Raises:
            UsageError: The pool does not run.
        """
        return self._start(next(_numbers), function, args, kwargs)

    def remote(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> RRef[Any]:
        """Run ``function(*args, **kwargs)`` on this worker, which keeps the result, and return a reference to it.

        Args:
            function: As for :meth:`call`; often a class.
            *args: Its arguments.
            **kwargs: Its keyword arguments.

        Returns:
            A reference to the result.

        Raises:
            UsageError: The pool does not run.

        Example:
            ``model = w[0].remote(Model)``, then ``model.rpc_sync().forward(x)``
        """
        self._pool._running_agent()
        return rpc.remote(self.name, function, args, kwargs, timeout=0)

    def _start(
        self, number: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.futures.Future[Any]:
        return rpc.rpc_async(self.name, self._task(number, function), args, kwargs, timeout=0)

    def _task(self, number: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as it travels."""
        agent = self._pool._running_agent()
        if not callable(function):
            raise TypeError(f"{function!r} is not a function.")
        if hasattr(function, "_wrapped_async_rpc_function"):
            return function  # with the decorator ``async_execution``: it does not wait, and is not interrupted
        return tasks.Interruptible(number, agent.dialect.name_of(function) or function)

    def _interrupt(self, number: int) -> torch.futures.Future[Any] | None:
        """Interrupt a task, without waiting; returns a future of the confirmation, or None if there can be none."""
        return self._tell(_INTERRUPT_SECONDS, tasks.interrupt, number)

    def _tell(self, seconds: float, function: Callable[..., None], *args: Any) -> torch.futures.Future[Any] | None:
        """Call a function of farprop's own on the worker, which does not wait behind the calls of the program."""
        future = Future()
        try:
            agent_registry.current_agent().call_async(self.name, function, args, {}, seconds, future, SYSTEM)
        except FarpropError:
            return None  # the pool was stopped meanwhile, or the worker has never joined
        return future


class _Step(threading.Thread):
    """The start or the stop of a pool, on a thread of its own: an interrupt ends the wait for it, and not the step."""

    def __init__(self, name: str, step: Callable[[], None]) -> None:
        super().__init__(name=name, daemon=True)
        self._step = [step]
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            step = self._step.pop()
        except IndexError:
            return  # it was started twice, by two threads at once
        try:
            step()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()

    @property
    def has_begun(self) -> bool:
        return self.ident is not None

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait for its end. After an interrupted ``join`` some versions of Python take the thread for ended."""
        self._ended.wait()


class WorkerPool(ABC):
    """Workers that this process starts, calls and ends. Use it in a ``with`` block, or call ``start`` and ``stop``.

    A subclass supplies ``_start_processes``, ``_end_processes`` and ``_ended``, and may override ``_store_host`` and
    ``_on_answered``. The first two and ``_store_host`` run on a thread of their own, where no interrupt comes.

    Args:
        count: The number of workers.
        timeout: The seconds that they have to start.

    Raises:
        UsageError: The number of workers is not 1 or more.
    """

    def __init__(self, count: int, timeout: float) -> None:
        if not isinstance(count, int) or count < 1:
            raise UsageError(f"A pool has one worker or more, not {count!r}.")
        self._timeout = timeout
        self._workers = [Worker(self, f"worker{index}") for index in range(count)]
        self._hurry = threading.Event()  # what is left to do in the start or the stop has to be quick
        self._was_started = False
        self._pid = 0
        self._starting = _Step("farprop-start", self._bring_up)
        self._stopping = _Step("farprop-stop", self._tear_down)
        self._agent: Agent | None = None
        self._store: dist.Store | None = None

    # For subclasses

    @abstractmethod
    def _start_processes(self, specs: Sequence[WorkerSpec]) -> None:
        """Start a process for each of ``specs``, which calls ``farprop.launch.spec.join``. Don't wait for them.

        If it raises, the start has failed, and ``_end_processes`` is called.
        """

    @abstractmethod
    def _end_processes(self) -> None:
        """End all processes, also those that never joined, and wait for that. The driver has left the group already.

        Called once. If ``_hurry`` is set, before or meanwhile, kill them.
        """

    @abstractmethod
    def _ended(self) -> dict[str, str]:
        """The workers whose processes have ended for good, by name; and how, for an error: ``was killed by SIGKILL.
        Its last output: ...``. Called often during the start.
        """

    def _store_host(self) -> str:
        """The address of this host under which the workers find the store."""
        return "127.0.0.1"

    def _on_answered(self) -> None:  # noqa: B027 - most need not do anything
        """Calls have ended. Called in the thread that made them, before it has their results."""

    # Starting and stopping

    def start(self: _Self) -> _Self:
        """Start the workers. When it returns, all can be called.

        Returns:
            The pool.

        Raises:
            UsageError: This process is a worker already, or the pool was started before.
            RendezvousError: A worker did not start. The text says which, with the last lines of its output. None is
                left behind.
        """
        if agent_registry.is_agent_set():
            raise UsageError(
                "This process is a worker already: of a pool that runs (stop it first), or because it has called "
                "init_rpc (call the workers of its job by their names, with farprop.rpc)."
            )
        if self._was_started:
            raise UsageError("A pool starts once. Make a new one.")
        self._was_started, self._pid = True, os.getpid()
        atexit.register(self.stop)
        try:
            self._finish(self._starting)
        except BaseException:
            self._hurry.set()
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the workers, and with them what they run. A second time, it does nothing."""
        if not self._was_started:
            self._was_started = True
            return
        if os.getpid() != self._pid:
            return  # a forked child ends
        self._finish(self._stopping)
        atexit.unregister(self.stop)

    def __enter__(self: _Self) -> _Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _finish(self, step: _Step) -> None:
        """Start a step and wait for its end. After an interrupt it has to be quick, and is waited for again."""
        try:
            with suppress(RuntimeError):  # it was started before
                step.start()
            step.wait()
        except BaseException:
            self._hurry.set()
            if step.has_begun:
                step.wait()
            raise
        if step.error is not None:
            raise step.error

    def _bring_up(self) -> None:
        host = self._store_host()
        secret = secrets.token_hex(32)
        self._store, port = _open_store(host)
        enter(self._store, WorkerSpec(DRIVER, 0, host, port, secret))
        self._agent = agent_registry.current_agent()
        self._start_processes(
            [WorkerSpec(worker.name, rank, host, port, secret) for rank, worker in enumerate(self._workers, 1)]
        )
        self._wait_until_joined(self._agent)

    def _wait_until_joined(self, agent: Agent) -> None:
        deadline = time.monotonic() + self._timeout
        names = {worker.name for worker in self._workers}
        while True:
            for name, how in self._ended().items():
                raise RendezvousError(f"The workers did not start: {name} {how}")
            missing = names.difference(info.name for info in agent.living_workers())
            if not missing:
                return
            if self._hurry.is_set():
                raise RendezvousError("The start of the workers was interrupted.")
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"The workers did not start: {', '.join(sorted(missing))} did not join within {self._timeout:g} s. "
                    "Is the machine busy? Pass a larger timeout."
                )
            self._hurry.wait(_LOOK_SECONDS)

    def _tear_down(self) -> None:
        if self._starting.has_begun and not self._starting.has_ended:  # another thread stops the pool, for example
            self._hurry.set()
            self._starting.wait()
        try:
            if self._agent is not None and agent_registry.installed is self._agent:
                self._agent.expect_end()
                for step in (spec.expect_end, spec.end_pool):
                    _wait_all([worker._tell(_END_SECONDS, step) for worker in self._workers])
                rpc.shutdown(graceful=False)
        finally:
            self._end_processes()
            self._agent = self._store = None

    def _running_agent(self) -> Agent:
        agent = self._agent
        if agent is None or agent_registry.installed is not agent:
            raise UsageError(
                "The pool does not run: it was not started, or was stopped. Make one with farprop.workers."
            )
        return agent

    # The workers

    def __len__(self) -> int:
        return len(self._workers)

    @overload
    def __getitem__(self, index: int) -> Worker: ...

    @overload
    def __getitem__(self, index: slice) -> list[Worker]: ...

    def __getitem__(self, index: int | slice) -> Worker | list[Worker]:
        return self._workers[index]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def __reduce__(self) -> Any:
        raise UsageError(
            "A pool belongs to its driver. Send names of workers, and use farprop.rpc on the other worker."
        )

    def map(self, function: Callable[[Any], Any], items: Iterable[Any], *, progress: bool | None = None) -> list[Any]:
        """Run ``function(item)`` for each item, on whichever worker is free.

        The first error ends it: no further item is begun, the functions that run are interrupted as :meth:`Worker.call`
        says, and the error is raised. So does an interrupt, or the death of a worker that ran a function.

        Args:
            function: The function, as for :meth:`Worker.call`.
            items: Its arguments: any iterable. Each is taken when a worker is free.
            progress: Whether to show a progress bar (by ``tqdm``). By default in a terminal and in a notebook, if
                ``tqdm`` is installed.

        Returns:
            The results, in the order of the items.

        Raises:
            ConnectionLostError: A worker has died while it ran the function, or none is left.
            UsageError: The pool does not run.
            Exception: What the function raised, or ``items``.

        Example:
            ``losses = w.map(evaluate, checkpoints)``
        """
        self._running_agent()
        ended = self._ended()
        free = [worker for worker in self._workers if worker.name not in ended]
        if not free:
            raise ConnectionLostError(f"No worker of the pool is left: {self._workers[0].name} {ended.popitem()[1]}")
        with progress_bar(progress, operator.length_hint(items) or None) as bar:
            return _Map(function, items, free, bar.update, self._on_answered).run()


class _Map:
    """One ``map`` of a pool. ``free`` are the workers to use, ``advance`` is called after each result."""

    def __init__(
        self,
        function: Callable[[Any], Any],
        items: Iterable[Any],
        free: list[Worker],
        advance: Callable[[], Any],
        on_answered: Callable[[], None],
    ) -> None:
        self._function = function
        self._items = enumerate(items)
        self._free = deque(free)
        self._advance = advance
        self._on_answered = on_answered
        self._done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._running: dict[int, tuple[Worker, int]] = {}  # by number: the worker, and the index of the item
        self._futures: dict[int, torch.futures.Future[Any]] = {}
        self._results: dict[int, Any] = {}

    def run(self) -> list[Any]:
        try:
            while self._begin_all() or self._running:
                self._end_one()
        except Exception:
            _wait_all(self._interrupt())
            self._on_answered()
            raise
        except BaseException:
            self._interrupt()
            raise
        self._on_answered()
        return [self._results[index] for index in range(len(self._results))]

    def _begin_all(self) -> bool:
        """Give each free worker an item; returns whether there was any."""
        began = False
        while self._free:
            try:
                index, item = next(self._items)
            except StopIteration:
                break
            began = True
            number = next(_numbers)
            worker = self._free.popleft()
            self._running[number] = worker, index  # first: an interrupt has to find it
            future = self._futures[number] = worker._start(number, self._function, (item,), {})
            # C code, as a callback has to be. The queue ignores its second argument, which is the future.
            future.add_done_callback(partial(self._done.put, number))
        return began

    def _end_one(self) -> None:
        number = self._done.get()
        future = self._futures.pop(number)
        worker, index = self._running.pop(number)
        self._results[index] = future.wait()
        self._free.append(worker)
        self._advance()

    def _interrupt(self) -> list[torch.futures.Future[Any] | None]:
        """Interrupt what runs; returns futures of the workers' confirmations."""
        return [worker._interrupt(number) for number, (worker, _) in self._running.items()]


def _wait_all(confirmations: Iterable[torch.futures.Future[Any] | None]) -> None:
    """Wait for workers that were told something. They may be dead."""
    for confirmation in confirmations:
        if confirmation is not None:
            with suppress(FarpropError):
                confirmation.wait()


def _open_store(host: str) -> tuple[dist.Store, int]:
    """Open a store that listens on this address alone; torch's own would listen on all."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=512) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port
