"""Rank 0 dies or leaves, and the store is elsewhere: in a file, or in a process that is no worker. The others go on."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, ReferenceLostError, UsageError
from tests.calls import functions as f
from tests.support.workers import Cluster, processes

pytestmark = pytest.mark.one_transport

WORKERS = 4

_kept: dict[str, Any] = {}


@pytest.fixture(params=["file", "store"])
def meeting(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str | int]:
    """Where the workers meet: a path, or the port of a store that the test runs."""
    if request.param == "file":
        yield str(tmp_path / "meet")
        return
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    yield server.port
    del server


def _join(meeting: str | int, rank: int, world_size: int | None) -> None:
    method: Any = f"file://{meeting}"
    if isinstance(meeting, int):
        method = dist.TCPStore("127.0.0.1", meeting, is_master=False, timeout=timedelta(seconds=30))
    options = rpc.TensorPipeRpcBackendOptions(init_method=method, rpc_timeout=30)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)


def _start(job: Cluster, meeting: str | int, world_size: int | None) -> None:
    """All but the last process, which may join later."""
    joins = [job.start(rank, _join, meeting, rank, world_size) for rank in range(WORKERS - 1)]
    for join in joins:
        join.result()


def _hold_references() -> None:
    """To a value of rank 0, and to one of the next worker that rank 0 has made and passed on."""
    _kept["of 0"] = rpc.remote("worker0", torch.ones, args=(3,))
    _kept["of 2"] = rpc.rpc_sync("worker0", _make_on, args=("worker2",))
    assert _kept["of 0"].to_here().sum() == _kept["of 2"].to_here().sum() == 3


def _make_on(worker: str) -> rpc.RRef[Any]:
    made = rpc.remote(worker, torch.ones, args=(3,))
    made.to_here()
    return made


def _go_on_without() -> None:
    """Calls, references and backward passes between the others work; those that need rank 0 raise."""
    # A worker that has left is unknown to those who have read the store since then.
    with pytest.raises((ConnectionLostError, UsageError)):
        rpc.rpc_sync("worker0", f.own_name)
    assert rpc.rpc_sync("worker2", f.own_name) == "worker2"
    with pytest.raises(ReferenceLostError):
        _kept["of 0"].to_here()
    assert _kept["of 2"].to_here().sum() == 3
    new = rpc.remote("worker2", torch.add, args=(torch.ones(2), 1))
    assert rpc.rpc_sync("worker2", torch.sum, args=(new.to_here(),)) == 4
    assert f.gradient_through("worker2") == [2.0] * 3
    _kept.clear()


def _end(job: Cluster, how: str) -> None:
    if how == "dies":
        job.kill(0)
    else:
        job.run(0, rpc.shutdown, graceful=False)


@pytest.mark.parametrize("how", ["dies", "leaves"])
def test_static_group_goes_on(meeting: str | int, how: str) -> None:
    """A graceful shutdown says who is missing, as for every worker, and ends."""
    with processes(WORKERS) as job:
        _start(job, meeting, WORKERS - 1)
        job.run(1, _hold_references)
        _end(job, how)
        job.run(1, _go_on_without)
        assert job.run(2, f.gradient_through, "worker1") == [2.0] * 3
        ends = [job.start(rank, _shut_down) for rank in (1, 2)]
        for end in ends:
            assert "worker0" in end.result()


def _shut_down() -> str:
    with pytest.raises(ConnectionLostError) as caught:
        rpc.shutdown(timeout=20)
    return str(caught.value)


def _leave_gracefully() -> None:
    rpc.shutdown(timeout=20)


@pytest.mark.parametrize("how", ["dies", "leaves", "leaves gracefully"])
def test_group_without_world_size_goes_on(meeting: str | int, how: str) -> None:
    """Others may join, find all members, and leave; rank 0 may come back."""
    with processes(WORKERS) as job:
        _start(job, meeting, None)
        job.run(1, _hold_references)
        if how == "leaves gracefully":
            job.run(0, _leave_gracefully)
        else:
            _end(job, how)
        job.run(1, _go_on_without)
        job.run(3, _join, meeting, 3, None)
        assert job.run(3, rpc.rpc_sync, "worker2", f.own_name) == "worker2"
        assert job.run(2, f.gradient_through, "worker3") == [2.0] * 3
        job.run(2, _leave_gracefully)
        assert job.run(1, rpc.rpc_sync, "worker3", f.own_name) == "worker3"
        job.run(2, _come_back, meeting)
        assert job.run(1, rpc.rpc_sync, "worker0", f.own_name) == "worker0"
        assert job.run(2, f.gradient_through, "worker3") == [2.0] * 3
        for process in (1, 3, 2):
            job.run(process, _leave_gracefully)


def _come_back(meeting: str | int) -> None:
    """Another process takes the place of rank 0. It has been a worker before: its next job has another prefix."""
    rpc._init_counter = 0
    _join(meeting, 0, None)
