"""Looking into a job from outside: who finds it, who may ask, and that the job does not notice."""

from __future__ import annotations

import json
import os
import secrets
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import farprop.inspect
import farprop.rpc as rpc
from farprop.cli.main import INCOMPLETE, OK, USAGE, main
from farprop.errors import AuthenticationError, UsageError
from farprop.inspect import outside
from farprop.protocol.handshake import DialerHandshake
from farprop.protocol.inspection import CHANNEL, OBSERVER, JobFile, Question, Silence, Snapshot
from farprop.runtime import job_files
from tests.inspection import functions as f
from tests.inspection.test_hangs import command
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport
_COMMANDS = ("ps", "calls", "refs", "passes", "stacks", "why")


def _files() -> list[Path]:
    return sorted(Path(tempfile.gettempdir(), f"farprop-{os.geteuid()}").glob("*.job"))


def test_job_is_found_by_its_name_its_id_and_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(2, env={"FARPROP_JOB_NAME": "train"}):
        files = _files()
        assert [stat.S_IMODE(path.stat().st_mode) for path in files] == [0o600, 0o600]
        job = farprop.inspect.find("train")
        assert [worker.name for worker in job.workers] == ["worker0", "worker1"]
        assert farprop.inspect.list_jobs().keys() == {"train"}
        for name in ("", job.id[:10], str(files[0])):
            assert farprop.inspect.find(name).id == job.id
        with pytest.raises(UsageError, match="There is no job 'other' .* Jobs that run: train."):
            farprop.inspect.find("other")
        with cluster(1, env={"FARPROP_JOB_NAME": "serve"}):
            with pytest.raises(UsageError, match=r"Several jobs run: serve \(.*\), train \("):
                farprop.inspect.find()
            assert main(["ps"]) == OK
            assert "job train" in (printed := capsys.readouterr().out)
            assert "job serve" in printed
    assert _files() == []


@pytest.mark.parametrize("name", _COMMANDS)
def test_commands_print_text_and_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(2, env={"FARPROP_JOB_NAME": "train"}) as job:
        waiting = job.start(0, rpc.rpc_sync, "worker1", f.wait_here, (), {}, 0)
        job.run(0, f.is_running, "wait_here")
        assert main([name, "train", "--json"]) == OK
        assert json.loads(capsys.readouterr().out) is not None
        assert main([name, "train"]) == OK
        text = capsys.readouterr().out
        if name in ("ps", "calls", "stacks", "why"):
            assert "wait_here" in text
        if name in ("calls", "stacks", "why"):
            assert "functions.py" in text
        if name == "stacks":
            assert "waits for worker1.wait_here, call worker0>worker1#" in text
            assert "runs wait_here for worker0, call worker0>worker1#" in text
            assert "client_connection.py" not in text  # farprop's own frames are left out
        job.run(1, f.release)
        waiting.result()


def test_top_prints_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(1, env={"FARPROP_JOB_NAME": "train"}):
        assert main(["top", "train", "--count", "2", "--interval", "0.01"]) == OK
        assert capsys.readouterr().out.count("job train") == 2


def test_errors_are_a_line_and_a_code() -> None:
    done = command("why", "no-such-job")
    assert done.returncode == USAGE
    assert done.stderr == "farprop: No job of this user runs on this host.\n"
    assert command("explain").returncode == USAGE
    shown = command("why", "--help")
    assert shown.returncode == 0
    assert "example:" in shown.stdout


def _own_file() -> JobFile:
    (file,) = [found for _, found in job_files.find_files()]
    return file


def test_observer_without_the_key_learns_nothing() -> None:
    with cluster(1):
        file = _own_file()
        forged = JobFile(file.job, file.name, file.member, file.identity, file.socket, secrets.token_bytes(32).hex())
        with pytest.raises((AuthenticationError, OSError)):
            outside._ask(forged, Question(0), 5.0)
        assert [*outside._ask(file, Question(0), 5.0).answers] == ["worker0"]


def _calls_socket() -> str:
    entry = rpc.api.current_agent().membership.find("worker0")
    assert entry is not None
    return entry.unix


def test_key_of_the_job_file_makes_no_calls() -> None:
    """On the socket for calls the key of observers proves nothing."""
    with cluster(1) as job:
        file = _own_file()
        for channel in (CHANNEL, b"unix"):
            machine = DialerHandshake(
                bytes.fromhex(file.key), OBSERVER, file.identity.encode(), channel, secrets.token_bytes(32)
            )
            with socket.socket(socket.AF_UNIX) as sock:
                sock.settimeout(5.0)
                sock.connect("\0" + job.run(0, _calls_socket))
                sock.sendall(machine.start())
                sock.sendall(machine.receive(sock.recv(4096)))
                assert sock.recv(4096) == b""  # refused, without a word


def test_garbage_and_silence_on_the_socket_keep_nobody_out() -> None:
    with cluster(1):
        file = _own_file()
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as garbage:
            garbage.connect("\0" + file.socket)
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
            silent.connect("\0" + file.socket)
            # The worker gives each two seconds.
            assert isinstance(outside._ask(file, Question(0), 10.0).answers["worker0"], Snapshot)


def _facts() -> Any:
    agent = rpc.api.current_agent()
    return sorted(agent.membership.entries), len(agent._accepted.all()), agent.idle


def test_observer_is_no_member() -> None:
    with cluster(2) as job:
        job.run(0, rpc.rpc_sync, "worker1", f.release)
        before = [job.run(rank, _facts) for rank in (0, 1)]
        for _ in range(5):
            farprop.inspect.find()
        assert [job.run(rank, _facts) for rank in (0, 1)] == before


def test_killed_worker_is_named_and_its_file_goes() -> None:
    with cluster(3, check=False) as job:
        paths = _files()
        job.kill(1)
        found = farprop.inspect.find()
        assert len(_files()) == len(paths) - 1
        silent = [answer for answer in found.workers if isinstance(answer, Silence)]
        assert [answer.name for answer in silent] == ["worker1"]
        assert "it has ended" in silent[0].reason
        assert main(["ps"]) == INCOMPLETE


def test_file_that_others_can_read_is_refused() -> None:
    with cluster(1):
        (path,) = _files()
        path.chmod(0o644)
        with pytest.raises(UsageError, match="is not a file of this user alone"):
            farprop.inspect.find(str(path))
        path.chmod(0o600)


def test_job_without_a_place_for_its_file_runs(tmp_path: Path) -> None:
    """With a given secret no directory is needed."""
    taken = tmp_path / "farprop"
    taken.write_text("not a directory")
    env = {"XDG_RUNTIME_DIR": str(tmp_path), "FARPROP_SECRET": secrets.token_hex(32)}
    with cluster(2, env=env) as job:
        assert job.run(0, rpc.rpc_sync, "worker1", f.release) is None


def _snapshot_of_worker1() -> Any:
    import torch

    import farprop.autograd as dist_autograd

    with dist_autograd.context():
        reference = rpc.remote("worker1", "make", (3,))
        assert torch.equal(reference.to_here(), torch.ones(3))
        job = farprop.inspect.job(stacks=True)
    return job.answers


@rpc.expose(name="make")
def make(size: int) -> Any:
    import torch

    return torch.ones(size)


def test_restricted_workers_tell_each_other_no_lines_and_no_ids() -> None:
    with cluster(2, env={"FARPROP_RESTRICTED": "1", "FARPROP_JOB_NAME": "ours"}) as job:
        job.run(1, _drop_it)  # imports this module, and with it what it exposes
        answers = job.run(0, _snapshot_of_worker1)
        own, other = answers["worker0"], answers["worker1"]
        assert own.references
        assert any(thread.frames for thread in own.threads)
        assert other.discreet
        assert other.references == other.passes == []
        assert all(thread.place is None and not thread.frames for thread in other.threads)
        seen = farprop.inspect.find("ours", stacks=True)
        assert all(any(thread.frames for thread in worker.threads) for worker in seen.snapshots)


def test_reader_that_goes_away_is_no_error() -> None:
    with cluster(1):
        piped = subprocess.run(
            f"{sys.executable} -m farprop ps | true", shell=True, capture_output=True, text=True, timeout=60
        )
        assert piped.stderr == ""


_kept: list[Any] = []


def _keep_a_reference() -> None:
    import torch

    _kept.append(rpc.remote("worker1", torch.ones, args=(1000,)))
    _kept[-1].to_here()


def _drop_it() -> None:
    _kept.clear()


def test_references_have_their_sizes_and_the_lines_that_made_them(capsys: pytest.CaptureFixture[str]) -> None:
    with cluster(2, env={"FARPROP_JOB_NAME": "train"}) as job:
        job.run(0, _keep_a_reference)
        assert main(["refs", "train", "--json"]) == OK
        owner = next(row for row in json.loads(capsys.readouterr().out) if row["role"] == "owner")
        assert (owner["worker"], owner["type"], owner["nbytes"]) == ("worker1", "Tensor", 4000)
        assert owner["holders"] == ["worker0"]
        assert "test_outside.py:" in owner["created_at"]
        assert main(["refs", "train"]) == OK
        assert "3.9 KiB" in capsys.readouterr().out
        job.run(0, _drop_it)
