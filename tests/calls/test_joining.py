"""Groups without a world size: joiners that are refused, workers that are killed, and those that come back."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.errors import RendezvousError
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
    return {path.name for path in Path(tempfile.gettempdir()).glob(f"farprop-{os.geteuid()}/*")}


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
