"""Worker processes as a test sees them: send calls, get answers, signal them, learn how they ended.

One thread per group reads all answers and exits. It ends when the last process has, so a group that is closed
leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from types import TracebackType
from typing import Any

import cloudpickle

from tests.support import forkserver, lock_order
from tests.support.child import Check, Failure, Setup
from tests.support.forkserver import Forked

Environment = Mapping[str, str | None]

# How long a worker that is told to stop with SIGABRT has to write its stacks.
_ABORT_TIMEOUT = 5.0
_OUTPUT_SHOWN = 20_000


class WorkersFailed(AssertionError):
    """Workers failed; the message has their tracebacks and their output."""


class WorkerDied(WorkersFailed):
    """A worker ended before it answered a call."""


class Worker:
    """One process."""

    def __init__(self, rank: int, forked: Forked) -> None:
        self.rank = rank
        self.name = f"worker{rank}"
        self.pid = forked.pid
        self.ended: Future[int | None] = Future()
        self.complaints: Future[list[str]] = Future()
        self._forked = forked
        self._numbers = itertools.count()
        self._pending: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    @property
    def busy(self) -> bool:
        """Whether it has calls that are not answered."""
        return bool(self._pending)

    def set_up(self, environ: Mapping[str, str], full_exit: bool) -> None:
        """Give it its environment. The first thing to do with it."""
        self._send(Setup(self.name, environ, os.getcwd(), sys.path, full_exit))

    def call(
        self, function: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Future[Any]:
        """Run a function there. The future has its result or its exception, or ``WorkerDied``."""
        payload = cloudpickle.dumps((function, args, kwargs or {}))
        future: Future[Any] = Future()
        with self._lock:
            if self.ended.done():
                future.set_exception(WorkerDied(f"{self} {self.how_it_ended()}"))
                return future
            number = next(self._numbers)
            self._pending[number] = future
        self._send(("call", number, payload))
        return future

    def finish(self, check: Check) -> None:
        """Let it end when its calls are done."""
        self._send(("finish", check))

    def signal(self, signum: int) -> None:
        """Send it a signal, if it still lives."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._forked.pidfd, signum)

    def how_it_ended(self) -> str:
        """How the process ended, in a few words."""
        code = self.ended.result()
        if code is None:
            return "went away with the fork server"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def output(self) -> str:
        """What it has written so far, or the end of that if it is long."""
        size = os.fstat(self._forked.output).st_size
        start = max(0, size - _OUTPUT_SHOWN)
        text = os.pread(self._forked.output, size - start, start).decode(errors="replace")
        return f"[{start} bytes before this left out]\n{text}" if start else text

    def _send(self, message: object) -> None:
        # If it is gone, its end is what fails the pending calls.
        with self._lock, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._forked.conn.send_bytes(pickle.dumps(message))

    # The rest is for the group's thread.

    def _register(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._forked.ended, selectors.EVENT_READ, self)
        selector.register(self._forked.conn, selectors.EVENT_READ, self)

    def _receive(self) -> bool:
        """Take one message; False if there will be no more."""
        try:
            kind, *rest = pickle.loads(self._forked.conn.recv_bytes())
        except (EOFError, OSError):
            return False
        if kind == "finished":
            self.complaints.set_result(rest[0])
            return True
        number, answer = rest
        with self._lock:
            future = self._pending.pop(number)
        if kind == "error":
            future.set_exception(self._exception(answer))
            return True
        try:
            value = pickle.loads(answer)
        except BaseException as error:
            error.add_note(f"while the answer of {self} was unpickled")
            future.set_exception(error)
        else:
            future.set_result(value)
        return True

    def _exception(self, failure: Failure) -> BaseException:
        error = failure.rebuild(f"in {self}")
        if error is None:
            error = WorkersFailed(f"{self} raised what can't be pickled: {failure.summary}\n{failure.traceback}")
        return error

    def _end(self) -> None:
        """The process has ended. What it sent before comes first."""
        while self._forked.conn.poll() and self._receive():
            pass
        code = os.read(self._forked.ended, 16)
        with self._lock:
            self.ended.set_result(int(code) if code else None)
            pending, self._pending = self._pending, {}
        if not self.complaints.done():
            self.complaints.set_result([])
        for future in pending.values():
            future.set_exception(WorkerDied(f"{self} {self.how_it_ended()} before it answered"))

    def _close(self) -> None:
        self._forked.conn.close()
        for fd in (self._forked.pidfd, self._forked.ended, self._forked.output):
            os.close(fd)


class WorkerGroup:
    """Several workers, one for each environment. A context manager: its exit kills workers that still run."""

    def __init__(self, environs: Sequence[Mapping[str, str]], full_exit: bool = False) -> None:
        self.workers: list[Worker] = []
        self._thread = threading.Thread(target=self._watch, name="harness-group")
        self._shown = False
        self._environs = environs
        self._full_exit = full_exit

    def __enter__(self) -> WorkerGroup:
        try:
            for rank, environ in enumerate(self._environs):
                checks_locks = environ.get(lock_order.VARIABLE) == "1"
                with_farprop = forkserver.WITHOUT_FARPROP not in environ
                self.workers.append(Worker(rank, forkserver.server(checks_locks, with_farprop).fork()))
                self.workers[-1].set_up(environ, self._full_exit)
        except BaseException as error:
            self._thread.start()
            self.__exit__(type(error), error, None)
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A worker in a call may be why the test failed: have it print its stacks.
        self.stop([w for w in self.workers if error is not None and w.busy])
        for worker in self.workers:
            worker.signal(signal.SIGKILL)
        self._thread.join()
        if not self._shown:
            self._show(error)
        for worker in self.workers:
            worker._close()

    def stop(self, workers: Sequence[Worker]) -> None:
        """End these workers; each writes the stacks of its threads to its output first."""
        for worker in workers:
            worker.signal(signal.SIGABRT)
        wait([w.ended for w in workers], _ABORT_TIMEOUT)
        for worker in workers:
            worker.signal(signal.SIGKILL)
        wait([w.ended for w in workers])

    def running(self) -> list[Worker]:
        """Those that have not ended."""
        return [w for w in self.workers if not w.ended.done()]

    def wait(self, timeout: float, give_up: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all have ended or ``give_up()``, asked at each end, is true; False if time is over."""
        deadline = time.monotonic() + timeout
        while (running := self.running()) and not give_up():
            if not wait([w.ended for w in running], deadline - time.monotonic(), FIRST_COMPLETED).done:
                return False
        return True

    def failure(self, problems: Sequence[str]) -> WorkersFailed:
        """An exception with the problems, and with all that the workers wrote."""
        self._shown = True
        return WorkersFailed("\n".join([*problems, *self._outputs()]))

    def _show(self, error: BaseException | None) -> None:
        if error is None:
            print(*self._outputs(), sep="\n", end="", file=sys.stderr)
            return
        for text in self._outputs():
            error.add_note(text)

    def _outputs(self) -> list[str]:
        texts = ((worker, worker.output()) for worker in self.workers)
        return [f"--- {worker} wrote:\n{text.rstrip()}\n" for worker, text in texts if text]

    def _watch(self) -> None:
        left = len(self.workers)
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                worker._register(selector)
            while left:
                for key, _ in selector.select():
                    worker = key.data
                    if key.fileobj == worker._forked.ended:
                        selector.unregister(worker._forked.ended)
                        with contextlib.suppress(KeyError):  # it may have gone first
                            selector.unregister(worker._forked.conn)
                        worker._end()
                        left -= 1
                    elif not worker.ended.done() and not worker._receive():
                        selector.unregister(worker._forked.conn)
