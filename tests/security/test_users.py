"""Another user of the same host can neither connect, nor read memory, nor stop a job by taking its paths."""

from __future__ import annotations

import dataclasses
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import farprop.rpc as rpc
from farprop.config import Settings
from farprop.errors import AuthenticationError, UsageError
from farprop.protocol.handshake import DialerHandshake
from farprop.protocol.roster import Entry
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.secret import find_secret
from tests.calls import functions as f
from tests.security.attackers import NOBODY
from tests.support.peers import own_entry
from tests.support.workers import Cluster, cluster, processes

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

_listener: socket.socket | None = None


def _become_nobody() -> None:
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)


@pytest.fixture
def attacker() -> Iterator[Cluster]:
    with processes(1, check=False) as running:
        running.run(0, _become_nobody)
        yield running


def _say_hello(unix: str) -> bytes:
    """A worker's answer to the first bytes of a dialer."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect("\0" + unix)
        try:
            sock.sendall(DialerHandshake(b"", b"a", b"b", b"unix", os.urandom(32)).start())
            return sock.recv(4096)
        except ConnectionError:
            return b""


def test_other_user_cannot_connect(attacker: Cluster) -> None:
    with cluster(2) as job:
        unix = job.run(0, own_entry).unix
        assert _say_hello(unix).startswith(b"FARPROP")  # the same user gets an answer
        assert attacker.run(0, _say_hello, unix) == b""
        assert job.run(1, rpc.rpc_sync, "worker0", f.add, (1,)) == 2


def _listen(name: str) -> None:
    global _listener
    _listener = socket.socket(socket.AF_UNIX)
    _listener.bind("\0" + name)
    _listener.listen()


def _dial(entry: Entry) -> None:
    current_agent()._dialer.dial(entry, time.monotonic() + 20)


def test_socket_of_another_user_is_not_used(attacker: Cluster) -> None:
    name = f"farprop-test-{os.getpid()}-{time.monotonic_ns()}"
    attacker.run(0, _listen, name)
    with cluster(2) as job:
        redirected = dataclasses.replace(job.run(1, own_entry), unix=name)
        with pytest.raises(AuthenticationError, match=rf"another user \(uid {NOBODY}\)"):
            job.run(0, _dial, redirected)


def _readable_memory(pid: int) -> list[str]:
    """The ways in which this user can access another process's memory."""
    ways = []
    for path in (f"/proc/{pid}/fd", f"/proc/{pid}/map_files"):
        try:
            ways += [name for name in os.listdir(path) if os.access(f"{path}/{name}", os.R_OK)]
        except PermissionError:
            pass
    for path in (f"/proc/{pid}/mem", f"/proc/{pid}/maps", f"/proc/{pid}/environ"):
        try:
            os.close(os.open(path, os.O_RDONLY))
            ways.append(path)
        except PermissionError:
            pass
    return ways + [name for name in os.listdir("/dev/shm") if "farprop" in name]


def test_other_user_cannot_read_shared_memory_or_the_secret(attacker: Cluster) -> None:
    with cluster(2) as job:
        tensor = torch.rand(1_000_000)
        assert torch.equal(job.run(0, rpc.rpc_sync, "worker1", f.identity, (tensor,)), tensor)
        assert _readable_memory(job.pid(0))  # the same user can read it
        assert attacker.run(0, _readable_memory, job.pid(0)) == []


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A directory like /tmp: every user can make files, and remove only their own."""
    path = Path(tempfile.mkdtemp(dir="/tmp", prefix="farprop-tests-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("what", ["directory", "file", "link"])
def test_other_user_cannot_stop_a_job_by_taking_its_paths(attacker: Cluster, shared_directory: Path, what: str) -> None:
    squatted = shared_directory / f"farprop-{os.geteuid()}"
    if what == "link":
        attacker.run(0, os.symlink, "/", str(squatted))
    elif what == "file":
        attacker.run(0, os.mkfifo, str(squatted), 0o777)
    else:
        attacker.run(0, os.mkdir, str(squatted), 0o777)
    with cluster(2, {"TMPDIR": str(shared_directory)}) as job:
        assert job.run(0, rpc.rpc_sync, "worker1", f.add, (1,)) == 2
    assert list(shared_directory.iterdir()) == [squatted]
    assert what != "directory" or not list(squatted.iterdir())


def test_secret_file_of_another_user_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("8f14e45fceea167a5a36dedd4bea2543")
    file.chmod(0o600)
    os.chown(file, NOBODY, NOBODY)
    with pytest.raises(UsageError, match=rf"belongs to another user \(uid {NOBODY}\)"):
        find_secret(Settings(secret_file=str(file)), "job", lambda _, value: value)
