"""Groups without a world size: joiners that are refused, workers that are killed, and those that come back."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.errors import (
    AuthenticationError,
    ConnectionLostError,
    ReferenceLostError,
    RendezvousError,
    RpcTimeoutError,
)
from farprop.runtime import agent
from farprop.runtime.liveness import Verdict
from tests.calls import functions as f
from tests.support.workers import Cluster, processes

pytestmark = pytest.mark.one_transport


def _join(path: str, name: str, rank: int, world_size: int | None = None, seconds: float = 10) -> str:
    """Join the group that meets at a file; returns the error if this worker is refused."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=seconds)
    try:
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    except RendezvousError as error:
        return str(error)
    return ""


def _call(worker: str) -> str:
    return str(rpc.rpc_sync(worker, f.own_name))


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the workers meet."""
    return str(tmp_path / "meet")


def _leave_all(job: Cluster, *processes: int) -> None:
    for process in processes:
        job.run(process, rpc.shutdown)


@pytest.mark.parametrize(
    ("name", "rank", "world_size", "says"),
    [
        ("worker0", 1, None, "Worker name 'worker0' is not unique"),
        ("worker1", 0, None, "Rank 0 is taken already"),
        ("worker1", 1, 2, "mixes statically and dynamically"),
    ],
)
def test_refused_joiner_does_no_harm(path: str, name: str, rank: int, world_size: int | None, says: str) -> None:
    """Others join after it, also under the name and the rank that it had asked for."""
    with processes(4) as job:
        assert job.run(0, _join, path, "worker0", 0) == ""
        assert says in job.run(1, _join, path, name, rank, world_size)
        assert job.run(2, _join, path, "worker1", 1) == ""
        assert job.run(1, _join, path, "worker2", 2) == ""
        assert job.run(2, _call, "worker0") == "worker0"
        assert job.run(0, _call, "worker2") == "worker2"
        _leave_all(job, 0, 1, 2)


def test_refused_worker_of_a_static_group_does_no_harm(path: str) -> None:
    """Two workers were started with rank 1. The group meets without the second of them."""
    with processes(4) as job:
        first = job.start(1, _join, path, "worker1", 1, 3)
        wait_until_claimed(path, "claim/1")
        assert "Rank 1 is taken already" in job.run(2, _join, path, "another", 1, 3)
        others = [job.start(process, _join, path, f"worker{rank}", rank, 3) for process, rank in ((0, 0), (3, 2))]
        assert [first.result(), *(other.result() for other in others)] == ["", "", ""]
        assert job.run(3, _call, "worker1") == "worker1"


def wait_until_claimed(path: str, key: str) -> None:
    """Wait until a worker has taken a rank or a name in the store."""
    store = dist.PrefixStore("rpc_prefix_0", dist.FileStore(path, -1))
    store.wait([key])


# The secret that the workers of a host have found


def _secrets() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob(f"farprop-{os.geteuid()}/*.secret*")}


def _fork() -> int:
    """Fork a child that outlives this worker, as a loader of data may; returns its process id."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    return pid


def test_secret_goes_with_the_last_worker(path: str) -> None:
    """Whether the others have left or were killed."""
    with processes(3) as job:
        for rank in range(3):
            assert job.run(rank, _join, path, f"worker{rank}", rank) == ""
        assert len(_secrets()) == 1
        job.kill(0)
        _leave_all(job, 1)
        assert len(_secrets()) == 1
        _leave_all(job, 2)
        assert not _secrets()


def test_secret_of_killed_workers_goes_when_the_next_job_starts(path: str) -> None:
    """Also if a child that one of them had forked is still there."""
    with processes(3) as job:
        for rank in range(2):
            assert job.run(rank, _join, path, f"worker{rank}", rank) == ""
        child = job.run(0, _fork)
        try:
            job.kill(0)
            job.kill(1)
            (left,) = _secrets()
            assert job.run(2, _join, f"{path}.next", "worker0", 0) == ""
            assert left not in _secrets()
            _leave_all(job, 2)
        finally:
            os.kill(child, signal.SIGKILL)
    assert not _secrets()


# Workers that come back


_kept: list[Any] = []


def _pid_of(worker: str) -> int:
    return int(rpc.rpc_sync(worker, os.getpid))


def _keep_reference(worker: str) -> None:
    _kept.append(rpc.remote(worker, f.own_name))
    assert _kept[0].to_here() == worker


def _use_reference() -> str:
    try:
        return str(_kept[0].to_here())
    except ReferenceLostError as error:
        return f"lost: {error}"
    finally:
        _kept.clear()


def _members() -> list[tuple[int, str]]:
    return sorted((info.id, info.name) for info in rpc.api.current_agent().get_worker_infos())


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_killed_worker_comes_back(path: str, way: str) -> None:
    """Under its name and rank, as a new incarnation: what belonged to the old one is lost."""
    with processes(3, {"FARPROP_TRANSPORT": way}) as job:
        for rank in range(2):
            assert job.run(rank, _join, path, f"worker{rank}", rank) == ""
        job.run(0, _keep_reference, "worker1")
        assert job.run(1, f.gradient_through, "worker0") == [2.0] * 3
        job.kill(1)
        assert job.run(2, _join, path, "worker1", 1) == ""
        assert job.run(0, _members) == [(0, "worker0"), (1, "worker1")]
        assert job.run(0, _pid_of, "worker1") == job.pid(2)
        assert job.run(2, _pid_of, "worker0") == job.pid(0)
        assert job.run(0, _use_reference).startswith("lost: worker1, which owned")
        job.run(0, _keep_reference, "worker1")
        assert job.run(0, _use_reference) == "worker1"
        assert job.run(0, f.gradient_through, "worker1") == job.run(2, f.gradient_through, "worker0") == [2.0] * 3
        _leave_all(job, 2, 0)


def test_name_and_rank_of_dead_workers_are_free_for_different_workers(path: str) -> None:
    with processes(4) as job:
        for rank in range(2):
            assert job.run(rank, _join, path, f"worker{rank}", rank) == ""
        assert job.run(0, _pid_of, "worker1") == job.pid(1)
        job.kill(1)
        assert job.run(2, _join, path, "worker1", 5) == ""
        assert job.run(3, _join, path, "other", 1) == ""
        assert job.run(0, _members) == [(0, "worker0"), (1, "other"), (5, "worker1")]
        assert [job.run(0, _pid_of, name) for name in ("worker1", "other")] == [job.pid(2), job.pid(3)]
        assert [job.run(process, _call, "worker0") for process in (2, 3)] == ["worker0"] * 2
        _leave_all(job, 3, 2, 0)


def test_of_two_joiners_with_the_name_of_a_dead_worker_one_is_refused(path: str) -> None:
    with processes(4) as job:
        for rank in range(2):
            assert job.run(rank, _join, path, f"worker{rank}", rank) == ""
        job.kill(1)
        joins = {process: job.start(process, _join, path, "worker1", 1) for process in (2, 3)}
        said = {process: join.result() for process, join in joins.items()}
        assert sorted(text[:30] for text in said.values()) == ["", "Worker name 'worker1' is not u"]
        (joined,) = (process for process, text in said.items() if not text)
        assert job.run(0, _pid_of, "worker1") == job.pid(joined)
        _leave_all(job, joined, 0)


def _stop(job: Cluster, process: int) -> None:
    """Stop a process, and wait until all of its threads have stopped."""
    job.signal(process, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while any(
        stat.read_text().rpartition(")")[2].split()[0] != "T"
        for stat in Path(f"/proc/{job.pid(process)}/task").glob("*/stat")
    ):
        assert time.monotonic() < deadline


def test_stopped_worker_keeps_its_name_and_rank(path: str) -> None:
    """It is slow, not dead."""
    with processes(3) as job:
        for rank in range(2):
            assert job.run(rank, _join, path, f"worker{rank}", rank) == ""
        _stop(job, 1)
        try:
            for name, rank in (("worker1", 2), ("worker2", 1)):
                assert "does not answer, but may be alive" in job.run(2, _join, path, name, rank, None, 5)
        finally:
            job.signal(1, signal.SIGCONT)
        assert job.run(0, _pid_of, "worker1") == job.pid(1)
        assert "by a process on" in job.run(2, _join, path, "worker1", 1)
        _leave_all(job, 1, 0)


def _join_whoever_lives(path: str, name: str, rank: int) -> str:
    """Join as a worker does that could not reach the one with its name for a long time."""
    before, agent.look_for = agent.look_for, lambda *_: Verdict.DEAD
    try:
        return _join(path, name, rank)
    finally:
        agent.look_for = before


def _start_endless_call(worker: str) -> None:
    _kept.append(rpc.rpc_async(worker, f.own_name, timeout=0))


def _await_endless_call() -> str:
    with pytest.raises(ConnectionLostError) as caught:
        _kept.pop().wait()
    return str(caught.value)


def _call_in_vain(worker: str) -> str:
    with pytest.raises((ConnectionLostError, AuthenticationError)) as caught:
        rpc.rpc_sync(worker, f.own_name)
    return str(caught.value)


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_worker_that_was_taken_for_dead_stays_out(path: str, way: str) -> None:
    """Its host vanished for a while, and another process has its name and rank. Nobody waits for it any more."""
    with processes(4, {"FARPROP_TRANSPORT": way}) as job:
        for rank in range(2):
            assert job.run(rank, _join, path, f"worker{rank}", rank) == ""
        assert job.run(0, _pid_of, "worker1") == job.pid(1)
        assert job.run(1, _pid_of, "worker0") == job.pid(0)
        _stop(job, 1)
        try:
            job.run(0, _start_endless_call, "worker1")
            assert job.run(2, _join_whoever_lives, path, "worker1", 1) == ""
            assert "another process has taken its place" in job.run(0, _await_endless_call)
        finally:
            job.signal(1, signal.SIGCONT)
        assert job.run(0, _pid_of, "worker1") == job.pid(2)
        job.run(1, _call_in_vain, "worker0")
        assert job.run(0, _pid_of, "worker1") == job.pid(2)
        job.run(1, rpc.shutdown)
        assert "is not unique" in job.run(3, _join, path, "worker1", 1)
        assert job.run(0, _members) == [(0, "worker0"), (1, "worker1")]
        _leave_all(job, 2, 0)


def test_worker_that_is_killed_again_and_again_comes_back(path: str) -> None:
    """While others call it: each call ends in the name or in a typed error."""
    with processes(7) as job:
        assert job.run(0, _join, path, "worker0", 0) == ""
        assert job.run(1, _join, path, "worker1", 1) == ""
        caller = job.start(0, _call_until_told, "worker1")
        for process in range(2, 7):
            job.kill(process - 1)
            assert job.run(process, _join, path, "worker1", 1) == ""
            assert job.run(process, rpc.rpc_sync, "worker0", _call_back, ("worker1",)) == "worker1"
        assert job.run(6, rpc.rpc_sync, "worker0", _end) is None
        assert caller.result() == []
        _leave_all(job, 6, 0)


_ended = threading.Event()


def _end() -> None:
    _ended.set()


def _call_back(worker: str) -> str:
    """Called by the new worker: this one can call it at once."""
    return str(rpc.rpc_sync(worker, f.own_name))


def _call_until_told(worker: str) -> list[str]:
    """Returns what should not have happened."""
    strange = []
    while not _ended.is_set():
        try:
            name = rpc.rpc_sync(worker, f.own_name, timeout=20)
            if name != worker:
                strange.append(name)
        except ConnectionLostError:
            pass
        except Exception as error:
            strange.append(repr(error))
    return strange


# Who is there


def _names() -> list[str]:
    return [info.name for info in rpc.workers()]


def _wait_for(wanted: int | list[str] | str, timeout: float) -> list[str]:
    return [info.name for info in rpc.wait_for_workers(wanted, timeout)]


def _wait_in_vain(wanted: int | list[str]) -> str:
    with pytest.raises(RpcTimeoutError) as caught:
        rpc.wait_for_workers(wanted, 0.01)
    return str(caught.value)


def test_waiting_for_workers(path: str) -> None:
    with processes(3) as job:
        assert job.run(0, _join, path, "worker0", 0) == ""
        assert job.run(0, _names) == ["worker0"]
        assert job.run(0, _wait_in_vain, 3).startswith("1 of 3 workers have joined within 0.01 s")
        assert job.run(0, _wait_in_vain, ["b", "worker0", "a"]).startswith("a, b did not join within")
        by_number = job.start(0, _wait_for, 3, 60)
        by_name = job.start(0, _wait_for, ["worker2", "worker0"], 0)
        assert job.run(1, _join, path, "worker1", 1) == ""
        assert not by_number.done()
        assert not by_name.done()
        assert job.run(2, _join, path, "worker2", 2) == ""
        assert by_number.result() == by_name.result() == ["worker0", "worker1", "worker2"]
        assert job.run(0, _wait_for, "worker1", 1) == ["worker0", "worker1", "worker2"]
        _leave_all(job, 1)
        assert job.run(0, _names) == job.run(2, _names) == ["worker0", "worker2"]
        _leave_all(job, 2, 0)


def _names_without(name: str) -> list[str]:
    """Look until this worker knows that another one is dead."""
    deadline = time.monotonic() + 30
    while name in (names := _names()):
        assert time.monotonic() < deadline
    return names


def test_dead_worker_is_not_listed(path: str) -> None:
    with processes(2) as job:
        for rank in range(2):
            assert job.run(rank, _join, path, f"worker{rank}", rank) == ""
        job.run(0, _keep_reference, "worker1")
        job.kill(1)
        assert job.run(0, _names_without, "worker1") == ["worker0"]
        assert job.run(0, _use_reference).startswith("lost: worker1, which owned")
        _leave_all(job, 0)
