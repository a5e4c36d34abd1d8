"""Workers on this host, for scripts and notebooks: ``farprop.workers``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

from farprop.errors import UsageError
from farprop.launch import local_worker
from farprop.launch.output import OutputRelay
from farprop.launch.pool import WorkerPool
from farprop.launch.spec import WorkerSpec

_LOOK_SECONDS = 0.01
_OUTPUT_SECONDS = 1.0  # that the last output of a process may take


class LocalWorkers(WorkerPool):
    """Workers in processes of this host, as :func:`workers` makes them."""

    def __init__(self, count: int, timeout: float) -> None:
        super().__init__(count, timeout)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._output = OutputRelay(self._on_output_ended)

    def _start_processes(self, specs: Sequence[WorkerSpec]) -> None:
        if not sys.executable:
            raise UsageError("This program does not know its Python interpreter: set sys.executable.")
        environment = dict(os.environ)
        # As many threads in all as there are cores. Otherwise each worker would take all of them for its operators.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(specs))))
        try:
            for spec in specs:
                process = self._processes[spec.name] = subprocess.Popen(
                    # The name is for those who look at the processes. The worker learns all else from the pipe.
                    [sys.executable, "-P", local_worker.__file__, spec.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    start_new_session=True,  # Ctrl-C in the terminal is for the driver alone
                )
                assert process.stdout is not None
                assert process.stderr is not None
                self._output.add(spec.name, process.stdout, process.stderr)
        finally:
            self._output.start()
        for spec in specs:
            pipe = self._processes[spec.name].stdin
            assert pipe is not None
            with suppress(BrokenPipeError):  # it has ended, and its output says why
                pipe.write(json.dumps({"spec": asdict(spec), "path": sys.path}).encode() + b"\n")
                pipe.flush()

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
        self._output.close(_OUTPUT_SECONDS)
        for process in processes:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            process.stderr.close()

    def _ended(self) -> dict[str, str]:
        return {
            name: self._how_ended(name, code)
            for name, process in list(self._processes.items())
            if (code := process.poll()) is not None
        }

    def _how_ended(self, name: str, code: int) -> str:
        self._output.wait_for_end(name, _OUTPUT_SECONDS)
        tail = self._output.tail(name)
        return f"{_shown(code)}. Its last output:\n" + "\n".join(tail) if tail else f"{_shown(code)}, without output."

    def _on_answered(self) -> None:
        self._output.settle()

    def _on_output_ended(self, name: str) -> None:
        """A worker has died. Calls to it fail, and its user should know why."""
        if self._agent is None or self._starting.is_alive() or self._stopping.ident is not None:
            return
        with suppress(subprocess.TimeoutExpired):
            code = self._processes[name].wait(_OUTPUT_SECONDS)
            print(f"farprop: {name} {_shown(code)}.", file=sys.stderr, flush=True)


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
