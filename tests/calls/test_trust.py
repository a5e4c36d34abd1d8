"""Authentication: only workers that know the secret can call. Garbage on an open port does no harm."""

from __future__ import annotations

import dataclasses
import os
import random
import resource
import socket
import struct
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import farprop.rpc as rpc
from farprop.errors import AuthenticationError
from farprop.protocol.handshake import DialerHandshake
from farprop.protocol.roster import Identity
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.dialer import WrongPeerError
from farprop.wire.message import REQUEST
from tests.calls import functions as f
from tests.support.peers import dial_as, hangs_up, own_entry, own_keys, receive
from tests.support.raw_messages import pack
from tests.support.workers import Cluster, cluster, run_workers

pytestmark = pytest.mark.one_transport  # these tests choose theirs

SECRET = "a-long-secret-for-the-tests-0123456789"
OTHER = "another-long-secret-for-tests-9876543210"


def _start_or_error(rank: int, timeout: float = 10) -> str:
    try:
        rpc.init_rpc(
            f"worker{rank}",
            rank=rank,
            world_size=2,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=timeout),
        )
    except RuntimeError as error:
        return str(error)
    name = rpc.rpc_sync(f"worker{1 - rank}", f.own_name)
    rpc.shutdown()
    return str(name)


def test_a_secret_from_the_environment_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o600)
    env = [{"FARPROP_SECRET": SECRET}, {"FARPROP_SECRET_FILE": str(file)}]
    assert run_workers(_start_or_error, 2, env=env) == ["worker1", "worker0"]
    file.chmod(0o644)
    (text,) = set(run_workers(_start_or_error, 2, env={"FARPROP_SECRET_FILE": str(file)}))
    assert f"chmod 600 {file}" in text


def test_different_secrets_are_refused_on_both_workers() -> None:
    texts = run_workers(_start_or_error, 2, env=[{"FARPROP_SECRET": SECRET}, {"FARPROP_SECRET": OTHER}])
    assert all("worker0 and worker1 have different secrets" in text for text in texts)
    texts = run_workers(_start_or_error, 2, env=[{"FARPROP_SECRET": SECRET}, {}])
    assert all("worker1 has no FARPROP_SECRET" in text for text in texts)


def test_workers_without_a_common_secret_directory_are_told_to_set_a_secret(tmp_path: Path) -> None:
    """Each worker makes a secret of its own, as on different hosts."""
    env = []
    for rank in range(2):
        place = tmp_path / str(rank)
        place.mkdir(mode=0o700)
        env.append({"XDG_RUNTIME_DIR": str(place)})
    for text in run_workers(_start_or_error, 2, env=env):
        assert "share no secret" in text
        assert "FARPROP_SECRET" in text
        assert "secrets.token_hex(32)" in text
    both = [{**e, "FARPROP_INSECURE": "1"} for e in env]
    assert run_workers(_start_or_error, 2, env=both) == ["worker1", "worker0"]


def _secret_files() -> list[tuple[str, int]]:
    directory = current_agent()._endpoint.secret.found.file.parent  # type: ignore[union-attr]
    return [(name, (directory / name).stat().st_mode & 0o777) for name in os.listdir(directory) if ".secret" in name]


def test_the_secret_file_is_deleted_when_all_have_joined(tmp_path: Path) -> None:
    with cluster(2, env={"XDG_RUNTIME_DIR": str(tmp_path)}) as c:
        assert c.run(0, _secret_files) == []


def test_a_secret_directory_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "farprop"
    place.mkdir()
    place.chmod(0o755)
    (text,) = set(run_workers(_start_or_error, 2, env={"XDG_RUNTIME_DIR": str(tmp_path)}))
    assert "not a directory of this user alone" in text


# A live worker and an attacker


def _addresses() -> tuple[tuple[str, int], str]:
    entry = current_agent()._own_entry
    return entry.tcp, entry.unix


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _connect(c: Cluster, kind: str) -> socket.socket:
    tcp, unix = c.run(0, _addresses)
    if kind == "tcp":
        connection = socket.create_connection(tcp)
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + unix)
    connection.settimeout(10)
    return connection


def _check_calls(c: Cluster) -> None:
    assert c.run(1, rpc.rpc_sync, "worker0", f.add, (1,)) == 2
    assert c.run(0, rpc.rpc_sync, "worker1", f.add, (1,)) == 2


class Bomb:
    """Creates a file if it is ever unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_nothing_is_unpickled_before_the_handshake_is_done(kind: str, tmp_path: Path) -> None:
    import pickle

    path = tmp_path / "boom"
    bomb = pickle.dumps(((Bomb(str(path)),), {}))
    request = pack(REQUEST, 0, 1, 0.0, b"builtins:print", bomb)
    hello = DialerHandshake(b"wrong key" * 4, b"worker1", b"worker0", b"unix", os.urandom(32)).start()
    with cluster(2) as c:
        # The flood at the end exceeds any message of a handshake, so the acceptor need not wait for more.
        flood = b"\xff" * 2000
        for data in (request, bomb, hello + request + flood, hello + b"\0" * 32 + b"\x05\0evil!" + request + flood):
            with _connect(c, kind) as connection:
                try:
                    connection.sendall(data)
                except ConnectionError:
                    continue
                assert hangs_up(connection)
        _check_calls(c)
    assert not path.exists()


def test_a_peer_with_the_secret_that_is_not_in_the_roster_is_refused() -> None:
    with cluster(2) as c:
        keys, entry, other = c.run(0, own_keys), c.run(0, own_entry), c.run(1, own_entry).identity
        for stranger in (
            Identity("stranger", 5, "abc", 1 << 30),
            other._replace(rank=0),
            other._replace(name="worker7"),
            other._replace(instance="another start"),
        ):
            for kind in ("tcp", "unix"):
                with pytest.raises(AuthenticationError, match="not a worker of this group"):
                    dial_as(stranger, keys, entry, kind)
        _check_calls(c)


def test_a_dialer_that_expects_another_worker_is_refused() -> None:
    """The address of a worker leads to another worker of the same job."""
    with cluster(2) as c:
        keys, entry, other = c.run(0, own_keys), c.run(0, own_entry), c.run(1, own_entry)
        for expected in (
            dataclasses.replace(other, tcp=entry.tcp),
            dataclasses.replace(entry, instance="before"),
            dataclasses.replace(entry, rank=1),
        ):
            with pytest.raises(WrongPeerError, match="worker0"):
                dial_as(other.identity, keys, expected)
        _check_calls(c)


def test_broken_frames_of_an_authenticated_peer_close_only_its_connection() -> None:
    with cluster(2) as c:
        keys, entry, identity = c.run(0, own_keys), c.run(0, own_entry), c.run(1, own_entry).identity
        good = pack(REQUEST, 0, 1, 0.0, b"builtins:abs", b"\x80\x05K\x01\x85}\x86.")
        broken = [
            b"\xff" * 64,
            good[:20] + b"\xff" * 200,
            struct.pack("<BBHHHQdQ", REQUEST, 0, 0, 0, 0, 1, 0.0, 1 << 62),
            struct.pack("<BBHHHQdQ", REQUEST, 0, 1, 0, 0, 1, 0.0, 0) + struct.pack("<QQ", 1 << 62, 0),
            pack(REQUEST, 0, 1, 0.0, b"", b"", [(100, 77)]),  # a segment that was never passed
            pack(REQUEST, 0, 1, 0.0, b"", b"", (), [5]),  # returns a segment that it does not have
            pack(2, 0, 1, 0.0, b"", b"x"),  # an answer without a request
        ]
        before = c.run(0, _rss)
        for data in broken:
            with closing(dial_as(identity, keys, entry)) as connection:
                connection.sendall(data)
                assert hangs_up(connection), data
        # The peer closes the connection in the middle of a frame.
        with closing(dial_as(identity, keys, entry, "unix")) as connection:
            connection.sendall(good[:-3])
        _check_calls(c)
        assert c.run(0, _rss) - before < 100 << 20


def test_a_bad_pickle_of_an_authenticated_peer_is_answered_with_a_failure() -> None:
    with cluster(2) as c:
        keys, entry, identity = c.run(0, own_keys), c.run(0, own_entry), c.run(1, own_entry).identity
        with closing(dial_as(identity, keys, entry)) as connection:
            for name, meta in (
                (b"builtins:abs", b"garbage"),
                (b"no.such:thing", b"\x80\x05)}\x86."),
                (b"\xff\xfe", b""),
            ):
                connection.sendall(pack(REQUEST, 0, 1, 0.0, name, meta))
                assert receive(connection)[0] == 3  # a FAILURE frame
        _check_calls(c)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.binary(min_size=1, max_size=2000), valid=st.integers(0, 42), kind=st.sampled_from(["tcp", "unix"]))
def _fuzz(c: Cluster, addresses: Any, data: bytes, valid: int, kind: str) -> None:
    hello = DialerHandshake(b"k" * 32, b"x", b"y", b"unix", os.urandom(32)).start()
    if kind == "tcp":
        connection = socket.create_connection(addresses[0])
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect("\0" + addresses[1])
    with connection:
        try:
            connection.sendall(hello[:valid] + data)
        except ConnectionError:
            pass


def test_random_bytes_on_a_live_port_do_no_harm() -> None:
    with cluster(2) as c:
        addresses = c.run(0, _addresses)
        before = c.run(0, _rss)
        _fuzz(c, addresses)
        _check_calls(c)
        assert c.run(0, _rss) - before < 50 << 20


def test_floods_of_connections_and_of_bytes_are_capped() -> None:
    with cluster(2, check=False) as c:
        before = c.run(0, _rss)
        tcp, _ = c.run(0, _addresses)
        held = []
        for _ in range(400):
            held.append(socket.create_connection(tcp))
        _check_calls(c)
        flood = _connect(c, "tcp")
        with flood:
            try:
                for _ in range(1000):
                    flood.sendall(random.randbytes(1 << 16))
            except OSError:
                pass
            else:
                raise AssertionError("nobody hung up")
        _check_calls(c)
        assert c.run(0, _pending_handshakes) <= 256
        assert c.run(0, _rss) - before < 50 << 20
        for connection in held:
            connection.close()
        deadline = time.monotonic() + 20
        while c.run(0, _pending_handshakes):
            assert time.monotonic() < deadline


def _pending_handshakes() -> int:
    return len(current_agent()._accepted._acceptor._pending)
