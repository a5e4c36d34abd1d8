"""The start and the end of local workers, whatever comes between: nothing is left behind."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

import farprop
import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RendezvousError, UsageError
from tests.launch.interrupting import ctrl_c_when, make_fifo


def _square(x: int) -> int:
    return x * x


def _die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _block_the_end(fifo: str) -> None:
    """Have this process say that it ends, and never end."""
    import atexit
    import threading

    def block() -> None:
        Path(fifo).write_text("ends")
        threading.Event().wait()

    atexit.register(block)


def _fake_python(directory: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Have workers run something else."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def _await_end(pids: list[int]) -> None:
    """Wait until processes, which need not be our children, have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                assert select.select([descriptor], [], [], 30)[0], f"{pid} still runs"
            finally:
                os.close(descriptor)


def test_a_pool_that_does_not_run() -> None:
    pool = farprop.workers(1)
    with pytest.raises(UsageError, match="does not run"):
        pool[0].call(_square, 1)
    with pytest.raises(UsageError, match="does not run"):
        pool.map(_square, [1])
    pool.stop()
    pool.stop()
    with pytest.raises(UsageError, match="starts once"):
        pool.start()


def test_a_worker_that_fails_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_python(tmp_path, monkeypatch, "echo no room on the disk >&2; exit 3")
    with pytest.raises(
        RendezvousError, match=r"worker\d ended with the exit code 3. Its last output:\nno room on the disk"
    ):
        farprop.workers(2).start()
    assert not rpc._is_current_rpc_agent_set()


def test_a_worker_that_never_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_python(tmp_path, monkeypatch, "exec sleep 1000")
    with (
        pytest.raises(RendezvousError, match="worker0, worker1 did not join within 0.2 s"),
        farprop.workers(2, timeout=0.2),
    ):
        pass
    assert not rpc._is_current_rpc_agent_set()


def test_ctrl_c_during_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = make_fifo(tmp_path, "ready")
    _fake_python(tmp_path, monkeypatch, f"echo ready > {ready}; exec sleep 1000")
    pool = farprop.workers(1)
    with ctrl_c_when(ready):
        pool.start()
    assert not rpc._is_current_rpc_agent_set()
    pool.stop()


def test_restricted_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPROP_RESTRICTED", "1")
    with pytest.raises(UsageError, match="Unset FARPROP_RESTRICTED"):
        farprop.workers(1).start()


def test_a_worker_dies_and_the_end_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Together, because a pool takes seconds to start."""
    pool = farprop.workers(2, timeout=100).start()
    with pytest.raises(ConnectionLostError):
        pool[1].call(_die, 0)
    assert pool[0].call(_square, 3) == 9
    assert pool.map(_square, range(3)) == [0, 1, 4]  # by the one that is left
    pool._processes["worker1"].wait()
    pool._tails["worker1"].wait_until_closed(10)
    assert "farprop: worker1 was killed by SIGKILL." in capsys.readouterr().err
    ends = make_fifo(tmp_path, "ends")
    pool[0].call(_block_the_end, ends)
    with ctrl_c_when(ends):
        pool.stop()
    assert pool._processes["worker0"].returncode == -signal.SIGKILL
    pool.stop()


# A program with functions and classes of its own. Its workers have another __main__.
_PROGRAM = """
import json, os, signal, sys
import torch
import farprop, farprop.rpc as rpc

class Point:
    def __init__(self, x): self.x = x
    def doubled(self): return Point(2 * self.x)

class Broken(Exception): pass

def double(point): return point.doubled()
def fail(): raise Broken("by value")
def nested(x): return rpc.rpc_sync("worker1", double, (Point(x),)).x

with farprop.workers(2, timeout=100) as w:
    there = w[0].call(double, Point(3))
    assert type(there) is Point and there.x == 6
    assert isinstance(w[1].remote(Point, 4).to_here(), Point)
    assert w[1].remote(Point, 4).rpc_sync().doubled().x == 8
    assert rpc.rpc_sync("worker0", double, (Point(5),)).x == 10
    assert rpc.rpc_async("worker1", Point.doubled, (Point(6),)).wait().x == 12
    assert rpc.remote("worker1", double, (Point(7),)).to_here().x == 14
    assert w[0].call(nested, 8) == 16
    assert w.map(Point, [1, 2])[1].x == 2
    try:
        w[1].call(fail)
    except Broken as error:
        assert str(error) == "by value"
    def double(point): return "redefined"
    assert w[0].call(double, Point(1)) == "redefined"
    print(json.dumps([worker.call(os.getpid) for worker in w]), flush=True)
    signal.pause()
"""


def test_what_is_in_main_travels_by_value_and_workers_end_with_a_killed_driver(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(_PROGRAM))
    path = os.pathsep.join(path for path in sys.path if path)
    driver = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    with driver:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        driver.kill()
        _, errors = driver.communicate()
    assert line, errors.decode()
    _await_end(json.loads(line))


def _be_slow_to_hear_of_the_end() -> None:
    """Have this worker take a while until it knows that the pool ends."""
    from farprop.runtime.agent import Agent

    expect_end = Agent.expect_end

    def expect_end_late(agent: Agent) -> None:
        time.sleep(0.4)
        expect_end(agent)

    Agent.expect_end = expect_end_late  # type: ignore[method-assign]


def _keep(reference: rpc.RRef[int]) -> int:
    globals()["kept"] = reference
    return reference.to_here()


def test_no_worker_takes_the_end_of_another_for_its_death(capsys: pytest.CaptureFixture[str]) -> None:
    with farprop.workers(2) as pool:
        assert pool[1].call(_keep, pool[0].remote(_square, 3)) == 9
        pool[1].call(_be_slow_to_hear_of_the_end)
    assert capsys.readouterr().err == ""
