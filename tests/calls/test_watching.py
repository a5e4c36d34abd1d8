"""Who is told when workers join, leave and die: ``on_join``, ``on_leave`` and ``on_failure``."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.errors import UsageError
from farprop.rpc import WorkerInfo
from farprop.runtime import liveness, peers
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.support.hosts import Hosts
from tests.support.workers import Cluster, cluster, free_port, processes

pytestmark = pytest.mark.one_transport

_told: list[tuple[str, ...]] = []
_handles: dict[str, Any] = {}
_changed = threading.Condition()


def _note(*event: str) -> None:
    with _changed:
        _told.append(event)
        _changed.notify_all()


def _watch(*kinds: str) -> None:
    """Note who joins and leaves."""
    for kind in kinds:
        if kind == "join":
            _handles[kind] = rpc.on_join(lambda info: _note("join", info.name, str(info.id)))
        else:
            _handles[kind] = rpc.on_leave(lambda info: _note("leave", info.name, str(info.id)))


def _watch_failure(worker: str | int) -> None:
    _handles[str(worker)] = rpc.on_failure(worker, lambda info, reason: _note("failure", info.name, reason))


def _wait_for(*event: str) -> list[tuple[str, ...]]:
    """Wait until an event that begins so was told; returns all events."""
    with _changed:
        assert _changed.wait_for(lambda: any(told[: len(event)] == event for told in _told), 30), _told
        return list(_told)


def _join(path: str, name: str, rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=20)
    rpc.init_rpc(name, rank=rank, rpc_backend_options=options)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Where the workers meet."""
    return str(tmp_path / "meet")


def _start(job: Cluster, path: str, *ranks: int) -> None:
    for rank in ranks:
        job.run(rank, _join, path, f"worker{rank}", rank)


def _leave(job: Cluster, *processes: int) -> None:
    for process in processes:
        job.run(process, rpc.shutdown)


def test_joins_and_leaves_are_told_once(path: str) -> None:
    """To every worker that has asked, also of workers that make no calls; not of those that were there before."""
    with processes(4) as job:
        _start(job, path, 0, 1)
        for process in (0, 1):
            job.run(process, _watch, "join", "leave")
        _start(job, path, 2)
        for process in (0, 1):
            job.run(process, _wait_for, "join", "worker2", "2")
        _start(job, path, 3)
        for process in (0, 1):
            job.run(process, _wait_for, "join", "worker3", "3")
        _leave(job, 2)
        expected = [("join", "worker2", "2"), ("join", "worker3", "3"), ("leave", "worker2", "2")]
        for process in (0, 1):
            assert job.run(process, _wait_for, "leave", "worker2") == expected
        _leave(job, 1)
        assert job.run(0, _wait_for, "leave", "worker1") == [*expected, ("leave", "worker1", "1")]
        _leave(job, 3, 0)


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_death_is_told_in_a_group_without_world_size(path: str, way: str) -> None:
    """Also of a worker that nobody has called. The one that takes its place has joined."""
    with processes(4, {"FARPROP_TRANSPORT": way}) as job:
        _start(job, path, 0, 1, 2)
        job.run(0, _watch, "join", "leave")
        job.run(0, _watch_failure, "worker1")
        job.run(0, _watch_failure, "worker2")
        job.kill(1)
        assert {event[:2] for event in job.run(0, _wait_for, "failure", "worker1")} <= {
            ("leave", "worker1"),
            ("failure", "worker1"),
        }
        job.run(3, _join, path, "worker1", 1)
        job.run(0, _wait_for, "join", "worker1", "1")
        _leave(job, 2)
        told = job.run(0, _wait_for, "leave", "worker2")
        assert [event[:2] for event in told] == [
            ("leave", "worker1"),
            ("failure", "worker1"),
            ("join", "worker1"),
            ("leave", "worker2"),
        ]
        assert all(event[2] for event in told)
        _leave(job, 3, 0)


def test_successor_that_joins_first_is_told_after_the_death(path: str) -> None:
    """A worker without connections learns of both from the store, and of the death first."""
    with processes(3) as job:
        _start(job, path, 0, 1)
        job.run(0, _watch, "join")
        job.run(0, _watch_failure, 1)
        job.kill(1)
        job.run(2, _join, path, "worker1", 1)
        told = job.run(0, _wait_for, "join", "worker1")
        assert [event[:2] for event in told] == [("failure", "worker1"), ("join", "worker1")]
        _leave(job, 2, 0)


def test_worker_that_leaves_and_comes_back_has_not_failed(path: str) -> None:
    with processes(3) as job:
        _start(job, path, 0, 1)
        job.run(0, _watch, "join", "leave")
        job.run(0, _watch_failure, "worker1")
        _leave(job, 1)
        job.run(2, _join, path, "worker1", 1)
        told = job.run(0, _wait_for, "join", "worker1")
        assert [event[:2] for event in told] == [("leave", "worker1"), ("join", "worker1")]
        assert job.run(2, rpc.rpc_sync, "worker0", f.own_name) == "worker0"
        _leave(job, 2, 0)


@pytest.mark.parametrize("way", ["auto", "tcp"])
def test_death_is_told_in_a_static_group(way: str) -> None:
    with cluster(3, {"FARPROP_TRANSPORT": way}) as job:
        job.run(0, _watch, "leave")
        job.run(0, _watch_failure, "worker1")
        job.run(2, _watch_failure, 1)
        job.run(0, _watch_failure, "worker2")
        job.kill(1)
        assert [event[:2] for event in job.run(0, _wait_for, "failure")] == [
            ("leave", "worker1"),
            ("failure", "worker1"),
        ]
        assert len(job.run(2, _wait_for, "failure", "worker1")) == 1
        assert job.run(0, rpc.rpc_sync, "worker2", f.own_name) == "worker2"
        job.run(0, _watch_failure, rpc.WorkerInfo("worker1", 1))  # it is dead already
        assert job.run(0, _wait_for, "failure", "worker1", "It was dead already.")[2:] == [
            ("failure", "worker1", "It was dead already.")
        ]


def _note_and_raise(info: WorkerInfo) -> None:
    _note("raised", info.name)
    raise ValueError("no")


def _call_back(info: WorkerInfo) -> None:
    _note("answer", str(rpc.rpc_sync(info, f.own_name)), threading.current_thread().name)


def _watch_badly() -> None:
    rpc.on_join(_note_and_raise)
    rpc.on_join(_call_back)


class _Kept(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _note("logged", record.getMessage())


def _keep_log() -> None:
    logging.getLogger("farprop.runtime.watch").addHandler(_Kept())


def test_callbacks_may_call_and_what_they_raise_is_logged(path: str) -> None:
    with processes(2) as job:
        _start(job, path, 0)
        job.run(0, _keep_log)
        job.run(0, _watch_badly)
        _start(job, path, 1)
        told = job.run(0, _wait_for, "answer", "worker1")
        assert told[:2] == [("raised", "worker1"), ("logged", "worker0 (rank 0): an on_join callback failed")]
        assert told[2][2].startswith("farprop-worker0")
        _leave(job, 1, 0)


def _remove(kind: str) -> None:
    _handles.pop(kind).remove()


def test_removed_callback_is_not_called(path: str) -> None:
    with processes(3) as job:
        _start(job, path, 0)
        job.run(0, _watch, "join", "leave")
        _start(job, path, 1)
        job.run(0, _wait_for, "join", "worker1")
        job.run(0, _remove, "join")
        _start(job, path, 2)
        _leave(job, 2)
        _leave(job, 1)
        assert job.run(0, _wait_for, "leave", "worker1")[0] == ("join", "worker1", "1")
        assert ("join", "worker2", "2") not in job.run(0, _wait_for, "leave", "worker1")
        _leave(job, 0)


def _watch_itself() -> None:
    with pytest.raises(UsageError, match="its own failure"):
        rpc.on_failure("worker0", lambda info, reason: None)
    with pytest.raises(UsageError, match="nobody"):
        rpc.on_failure("nobody", lambda info, reason: None)


def test_failure_of_oneself_or_nobody_is_refused() -> None:
    with cluster(2) as job:
        job.run(0, _watch_itself)


def test_nobody_watches_before_init() -> None:
    for register in (rpc.on_join, rpc.on_leave, lambda callback: rpc.on_failure("worker1", callback)):
        with pytest.raises(UsageError, match="has not been initialized"):
            register(print)


def test_end_of_the_job_is_told_to_nobody() -> None:
    """All workers of a static group leave together, while callbacks are registered."""
    with cluster(3) as job:
        for rank in range(3):
            job.run(rank, _watch, "leave")
            job.run(rank, _watch_failure, (rank + 1) % 3)
        ends = [job.start(rank, _shut_down) for rank in range(3)]
        assert [end.result() for end in ends] == [[], [], []]


def _shut_down() -> list[tuple[str, ...]]:
    rpc.shutdown()
    return _told


def test_many_join_and_die(path: str) -> None:
    """Every instance is told once, whatever order things come in."""
    with processes(6) as job:
        _start(job, path, 0)
        job.run(0, _watch, "join", "leave")
        joins = [job.start(process, _join, path, f"worker{process}", process) for process in range(1, 6)]
        for join in joins:
            join.result()
        for process in range(1, 6):
            job.run(0, _wait_for, "join", f"worker{process}")
        for process in range(1, 6):
            if process % 2:
                job.kill(process)
            else:
                _leave(job, process)
        for process in range(1, 6):
            told = job.run(0, _wait_for, "leave", f"worker{process}")
        assert sorted(event[:2] for event in told) == sorted(
            (kind, f"worker{process}") for kind in ("join", "leave") for process in range(1, 6)
        )
        _leave(job, 0)


def _join_at(port: int, rank: int) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}", rpc_timeout=20)
    rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options)


def test_death_of_the_worker_that_has_the_store_is_told() -> None:
    """The others can't ask the store any more, but call each other."""
    port = free_port()
    with processes(3) as job:
        for rank in range(3):
            job.run(rank, _join_at, port, rank)
        for rank in (1, 2):
            job.run(rank, _watch, "join", "leave")
            job.run(rank, _watch_failure, "worker0")
        job.kill(0)
        for rank in (1, 2):
            told = job.run(rank, _wait_for, "failure", "worker0")
            assert [event[:2] for event in told] == [("leave", "worker0"), ("failure", "worker0")]
        assert job.run(1, rpc.rpc_sync, "worker2", f.own_name) == "worker2"
        job.kill(2)
        job.run(1, _wait_for, "leave", "worker2")
        _leave(job, 1)


# Between hosts


def _lose_patience() -> None:
    """Two minutes are too long for a test."""
    liveness.PATIENCE = peers._DIAL_SECONDS = 1.0


def _has_no_connection() -> None:
    connections = current_agent().peers.connections
    wait_until(lambda: "worker1" not in connections, "the connection is lost")


def _has_connection() -> None:
    connections = current_agent().peers.connections
    wait_until(lambda: "worker1" in connections, "there is a connection")


def test_vanished_host_is_told_although_no_call_is_open(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        job.run(0, _lose_patience)
        job.run(0, _watch_failure, "worker1")
        job.run(0, _has_connection)
        hosts.cut(1)
        assert len(job.run(0, _wait_for, "failure", "worker1")) == 1
        hosts.mend(1)
        for rank in range(2):
            job.run(rank, rpc.shutdown, graceful=False)


def test_worker_that_was_only_cut_off_has_not_died(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        job.run(0, _watch_failure, "worker1")
        job.run(0, _has_connection)
        hosts.cut(1)
        job.run(0, _has_no_connection)
        hosts.mend(1)
        job.run(0, _has_connection)
        assert job.run(0, rpc.rpc_sync, "worker1", f.own_name) == "worker1"
        job.run(1, rpc.shutdown, graceful=False)
        told = job.run(0, _wait_for, "failure", "worker1")
        assert len(told) == 1
        job.run(0, rpc.shutdown, graceful=False)
