"""``FARPROP_ON_FAILURE=end``: the death of one worker ends all, with the reason."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.support.workers import cluster, processes

pytestmark = pytest.mark.one_transport

END = {"FARPROP_ON_FAILURE": "end"}


def _prepare(directory: str) -> None:
    """Keep the log in memory, so that it is in its file only if it is flushed, and note a failure in a file."""
    name = rpc.get_worker_info().name
    target = logging.FileHandler(f"{directory}/{name}.log")
    logging.getLogger("farprop").addHandler(MemoryHandler(1000, logging.CRITICAL, target))
    rpc.on_failure("worker1", lambda info, reason: _write(f"{directory}/{name}.told", f"{info.name}: {reason}"))


def _write(path: str, text: str) -> None:
    Path(path).write_text(text)


def _wait_in_vain(directory: str) -> None:
    """Wait for a living worker, without a timeout, whatever is raised."""
    while True:
        try:
            rpc.rpc_sync("worker2", _block, timeout=0)
        except BaseException as error:
            if not Path(f"{directory}/error").exists():
                _write(f"{directory}/error", f"{type(error).__name__}: {error}")


_blocked = threading.Event()


def _block() -> None:
    _blocked.set()
    threading.Event().wait()


def _is_blocked() -> None:
    assert _blocked.wait(30)


def _join(path: str, name: str, rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=20)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)


@pytest.mark.parametrize("way", ["auto", "tcp"])
@pytest.mark.parametrize("is_static", [True, False])
def test_death_of_one_worker_ends_all(tmp_path: Path, is_static: bool, way: str) -> None:
    """Though one of them waits for a worker that lives, and swallows every error."""
    start = cluster if is_static else processes
    with start(3, {**END, "FARPROP_TRANSPORT": way}, check=False) as job:
        for rank in range(3):
            if not is_static:
                job.run(rank, _join, str(tmp_path / "meet"), f"worker{rank}", rank)
        for rank in (0, 2):
            job.run(rank, _prepare, str(tmp_path))
        job.start(0, _wait_in_vain, str(tmp_path))
        job.run(2, _is_blocked)
        job.kill(1)
        assert [job.wait(rank) for rank in (0, 2)] == [os.EX_UNAVAILABLE] * 2
    for name in ("worker0", "worker2"):
        log = (tmp_path / f"{name}.log").read_text()
        assert "ends with the exit code 69 (FARPROP_ON_FAILURE=end). worker1 (rank 1) has died: " in log
        assert (tmp_path / f"{name}.told").read_text().startswith("worker1: ")
    error = (tmp_path / "error").read_text()
    assert error.startswith(ConnectionLostError.__name__)
    assert "worker1 (rank 1) has died: " in error


def test_worker_that_joins_later_is_watched(tmp_path: Path) -> None:
    with processes(2, END, check=False) as job:
        for rank in range(2):
            job.run(rank, _join, str(tmp_path / "meet"), f"worker{rank}", rank)
        job.kill(1)
        assert job.wait(0) == os.EX_UNAVAILABLE


def _watch_leaving() -> None:
    rpc.on_leave(lambda info: f.note(info.name))


def _has_left(worker: str) -> str:
    wait_until(lambda: worker in f.noted())
    return str(rpc.rpc_sync("worker1", f.own_name))


def test_worker_that_leaves_ends_nobody(tmp_path: Path) -> None:
    with processes(3, END) as job:
        for rank in range(3):
            job.run(rank, _join, str(tmp_path / "meet"), f"worker{rank}", rank)
        job.run(0, _watch_leaving)
        job.run(2, rpc.shutdown)
        assert job.run(0, _has_left, "worker2") == "worker1"
        job.run(1, rpc.shutdown)
        job.run(0, rpc.shutdown)


def test_end_of_a_static_group_is_no_failure() -> None:
    """The harness checks the exit codes."""
    with cluster(4, END) as job:
        assert job.run(0, rpc.rpc_sync, "worker3", f.own_name) == "worker3"


def test_worker_that_only_tells_goes_on() -> None:
    """The setting is that of each process."""
    with cluster(3, [END, {}, {}]) as job:
        job.kill(2)
        assert job.wait(0) == os.EX_UNAVAILABLE
        assert job.run(1, rpc.rpc_sync, "worker1", f.own_name) == "worker1"


_PROGRAM = """
    import os, sys, threading
    import farprop.rpc as rpc

    rank = int(sys.argv[1])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[2]}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    died = threading.Event()
    if rank == 0:
        rpc.on_failure("worker1", lambda info, reason: died.set())
        rpc.rpc_async("worker1", os._exit, args=(3,))
    assert died.wait(30)
    print("not flushed", end="")
    sys.exit(0)
"""


def test_program_that_ends_first_has_the_same_exit_code(tmp_path: Path) -> None:
    """The main thread ends with 0 as soon as it has heard of the death. What it wrote is not lost."""
    args = [sys.executable, "-c", textwrap.dedent(_PROGRAM)]
    env = {**os.environ, **END}
    workers = [
        subprocess.Popen([*args, str(rank), str(tmp_path / "meet")], env=env, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=60)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [os.EX_UNAVAILABLE, 3]
    assert outputs[0] == "not flushed"
