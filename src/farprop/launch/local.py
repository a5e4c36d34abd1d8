"""Workers on this host, for scripts and notebooks: ``farprop.workers``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, cast

from farprop.errors import UsageError
from farprop.launch import local_worker
from farprop.launch.output import Output
from farprop.launch.pool import WorkerPool
from farprop.launch.spec import WorkerSpec

_LOOK_SECONDS = 0.01
_OUTPUT_SECONDS = 1.0  # that the last output of a process may take
_TAIL_LINES = 20


class _CurrentStream:
    """``sys.stdout`` or ``sys.stderr``, as it is when something is written. In a notebook the running cell shows it.

    The stream may be None, or raise anything. Workers must not stand still because of that.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def write(self, text: str) -> None:
        with suppress(Exception):
            getattr(sys, self._name).write(text)

    def flush(self) -> None:
        with suppress(Exception):
            getattr(sys, self._name).flush()


class _Tail:
    """The last output of a worker, both streams together. It is given all of it, and closed by each stream."""

    def __init__(self, on_closed: Callable[[], None]) -> None:
        self._chunks: deque[bytes] = deque(maxlen=2 * _TAIL_LINES)
        self._on_closed = on_closed
        self._open = 2

    def write(self, chunk: bytes) -> None:
        self._chunks.append(chunk)

    def close(self) -> None:
        self._open -= 1
        if not self._open:
            self._on_closed()

    def lines(self) -> list[str]:
        return b"".join(self._chunks).decode(errors="replace").splitlines()[-_TAIL_LINES:]

    def wait_until_closed(self, seconds: float) -> None:
        """Wait for the output of a worker that has ended. Its children may have the pipes."""
        end = time.monotonic() + seconds
        while self._open and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)


class LocalWorkers(WorkerPool):
    """Workers in processes of this host, as :func:`workers` makes them."""

    def __init__(self, count: int, timeout: float) -> None:
        super().__init__(count, timeout)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tails: dict[str, _Tail] = {}
        self._output: Output | None = None

    def _start_processes(self, specs: Sequence[WorkerSpec]) -> None:
        if not sys.executable:
            raise UsageError("This program does not know its Python interpreter: set sys.executable.")
        environment = dict(os.environ)
        # As many threads in all as there are cores. Otherwise each worker would take all of them for its operators.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(specs))))
        self._output = Output(colours=False)
        for index, spec in enumerate(specs):
            self._start_process(self._output, index, spec, environment)
        for spec in specs:
            pipe = self._processes[spec.name].stdin
            assert pipe is not None
            with suppress(BrokenPipeError):  # it has ended, and its output says why
                pipe.write(json.dumps({"spec": asdict(spec), "path": sys.path}).encode() + b"\n")
                pipe.flush()

    def _start_process(self, output: Output, index: int, spec: WorkerSpec, environment: dict[str, str]) -> None:
        tail = self._tails[spec.name] = _Tail(partial(self._on_output_ended, spec.name))
        writers = []
        try:
            for name in ("stdout", "stderr"):
                reader, writer = os.pipe()
                os.set_blocking(reader, False)
                writers.append(writer)
                output.add(reader, index, cast(Any, _CurrentStream(name)), cast(Any, tail))
            self._processes[spec.name] = subprocess.Popen(
                # The name is for those who look at the processes. The worker learns all else from its input.
                [sys.executable, "-P", local_worker.__file__, spec.name],
                stdin=subprocess.PIPE,
                stdout=writers[0],
                stderr=writers[1],
                env=environment,
                start_new_session=True,  # Ctrl-C in the terminal is for the driver alone
            )
        finally:
            for writer in writers:
                os.close(writer)

    def _end_processes(self) -> None:
        processes = self._processes.values()
        for process in processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()  # a worker ends when this pipe does
        deadline = time.monotonic() + local_worker.END_SECONDS
        while any(process.poll() is None for process in processes):
            if self._hurry.is_set() or time.monotonic() > deadline:
                for process in processes:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)  # it is the leader of its group
                        process.wait()
            self._hurry.wait(_LOOK_SECONDS)
        if self._output is not None:
            self._output.finish()

    def _ended(self) -> dict[str, str]:
        return {
            name: self._how_ended(name, code)
            for name, process in self._processes.copy().items()
            if (code := process.poll()) is not None
        }

    def _how_ended(self, name: str, code: int) -> str:
        tail = self._tails[name]
        tail.wait_until_closed(_OUTPUT_SECONDS)
        lines = tail.lines()
        return f"{_shown(code)}. Its last output:\n" + "\n".join(lines) if lines else f"{_shown(code)}, without output."

    def _on_answered(self) -> None:
        if self._output is not None and not self._stopping.has_begun:
            with suppress(ValueError):  # another thread has just stopped the pool
                self._output.settle()

    def _on_output_ended(self, name: str) -> None:
        """A worker has died, unless the pool starts or stops. Calls to it fail, and its user should know why."""
        if self._stopping.has_begun or not self._starting.has_ended:
            return
        with suppress(subprocess.TimeoutExpired):
            code = self._processes[name].wait(_OUTPUT_SECONDS)
            _CurrentStream("stderr").write(f"farprop: {name} {_shown(code)}.\n")


def _shown(code: int) -> str:
    if code >= 0:
        return f"ended with the exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by the signal {-code}"


def workers(count: int, *, timeout: float = 60.0) -> LocalWorkers:
    """Make a pool of workers on this host, for a script or a notebook.

    This process becomes the worker ``driver``; the others are ``worker0``, ``worker1`` and so on. What they print
    appears in this program's output, behind their names. They end with this process, however it ends.

    Args:
        count: The number of workers.
        timeout: The seconds that they have to start.

    Returns:
        The pool. A ``with`` block starts and stops it, or its methods ``start`` and ``stop``.

    Raises:
        UsageError: The number of workers is not 1 or more.

    Example:
        ``with farprop.workers(4) as w: print(w.map(math.sqrt, range(10)))``
    """
    return LocalWorkers(count, timeout)
