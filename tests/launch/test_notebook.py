"""``farprop.workers`` in a notebook: a real kernel runs its cells."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.interrupting import make_fifo

for package in ("nbformat", "nbclient", "ipykernel"):
    pytest.importorskip(package)


class Notebook:
    """A notebook with a kernel of its own."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "tests.launch.notebook_server"]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        self._group: int = self._read()["pid"]  # the kernel leads its group

    def run(self, source: str) -> tuple[str, str]:
        """Run a cell; returns what it printed, both streams together, and the name of its error."""
        assert self._server.stdin is not None
        print(json.dumps(source), file=self._server.stdin, flush=True)
        outcome = self._read()
        return outcome["text"], outcome["error"]

    def _read(self) -> Any:
        assert self._server.stdout is not None
        return json.loads(self._server.stdout.readline())

    def signal(self, number: int) -> None:
        """As Jupyter's buttons do."""
        os.killpg(self._group, number)

    def close(self) -> None:
        """End the kernel as Jupyter does."""
        self._server.communicate()


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    own = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    path = os.pathsep.join(path for path in sys.path if path)
    made = Notebook({**os.environ, **{name: str(tmp_path / name) for name in own}, "PYTHONPATH": path})
    yield made
    made.close()


def _watch_workers(pids: list[int]) -> list[int]:
    """Descriptors that become readable when these processes have ended."""
    return [os.pidfd_open(pid) for pid in pids]


def _await_end(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        assert select.select([descriptor], [], [], 30)[0], "a worker still runs"
        os.close(descriptor)


START = """
import os, time
import farprop, farprop.rpc as rpc
w = farprop.workers(2, timeout=100).start()
print(*[worker.call(os.getpid) for worker in w])
"""

LOOP = """
def loop(path):
    open(path, "w").close()
    while True:
        time.sleep(0.001)
w[0].call(loop, {path!r})
"""


def test_cells_and_a_killed_kernel(notebook: Notebook, tmp_path: Path) -> None:
    """One kernel for all: it takes seconds to start, with its workers."""
    pids, error = notebook.run(START)
    assert not error, pids
    workers = _watch_workers([int(pid) for pid in pids.split()])

    notebook.run("class Point:\n    def __init__(self, x): self.x = x\ndef double(p): return Point(2 * p.x)")
    assert notebook.run("r = w[0].call(double, Point(3)); print(type(r) is Point, r.x)") == ("True 6\n", "")
    notebook.run("def double(p): return 'redefined'")
    assert notebook.run("print(w[0].call(double, Point(3)))") == ("redefined\n", "")
    assert notebook.run("print(rpc.rpc_sync('worker1', double, (None,)))") == ("redefined\n", "")

    # The output of workers appears in the cell that runs, in front of the result.
    source = "def shout(x):\n    print('working on', x)\n    return -x\nprint(w[1].call(shout, 7))"
    assert notebook.run(source) == ("worker1 | working on 7\n-7\n", "")
    assert "3/3" in notebook.run("w.map(abs, [1, 2, 3])")[0]  # the progress bar

    # The error of a cell's class.
    notebook.run("class Broken(Exception): pass\ndef fail(): raise Broken('no')")
    assert notebook.run("w[0].call(fail)")[1] == "Broken"

    # A second run of the first cell.
    assert notebook.run(START)[1] == "UsageError"
    assert notebook.run("print(w[0].call(abs, -2))") == ("2\n", "")

    ready = make_fifo(tmp_path, "ready")

    def press() -> None:
        Path(ready).read_text()
        notebook.signal(signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    assert notebook.run(LOOP.format(path=ready))[1] == "KeyboardInterrupt"
    thread.join()
    assert notebook.run("print(w.map(abs, [-1, -2], progress=False), w[0].call(abs, -3))") == ("[1, 2] 3\n", "")

    notebook.signal(signal.SIGKILL)
    _await_end(workers)


def test_workers_end_with_the_kernel(notebook: Notebook) -> None:
    pids, error = notebook.run(START)
    assert not error, pids
    workers = _watch_workers([int(pid) for pid in pids.split()])
    notebook.close()
    _await_end(workers)
