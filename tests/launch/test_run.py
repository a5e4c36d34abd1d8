"""``farprop run``: real launchers, real workers. Where a worker needs no torch it has none, and starts at once."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters

from farprop.cli.main import main
from farprop.launch.run import _config
from farprop.launch.signed_rendezvous import BACKEND, create_handler
from tests.support.hosts import SECRET, Hosts

COMMAND = [sys.executable, "-m", "farprop", "run"]
SECONDS = 100

_FAILING = """
    import os, signal, sys
    print("hello", flush=True)
    if os.environ["RANK"] == "1":
        {failure}
    signal.pause()
"""


def _program(directory: Path, text: str, **values: str) -> str:
    path = directory / "program.py"
    path.write_text(textwrap.dedent(text).format(**values) if values else textwrap.dedent(text))
    return str(path)


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], text=True, capture_output=True, timeout=SECONDS)


@contextmanager
def _running(*words: str, before: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    command = [*before, *COMMAND, *words]
    pipes: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, stdin=subprocess.DEVNULL, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()


def _lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


def test_names_ranks_secret_and_arguments(tmp_path: Path) -> None:
    program = _program(
        tmp_path,
        """
        import os, sys
        import torch
        import farprop.rpc as rpc
        import beside
        rpc.init_rpc()
        me, size = rpc.get_worker_info(), len(rpc.workers())
        value = rpc.rpc_sync(f"worker{(me.id + 1) % size}", torch.add, args=(torch.ones(1), me.id)).item()
        print(me.name, size, value, sys.argv[1:], beside.value)
        print(os.environ["FARPROP_SECRET"], file=sys.stderr)
        print("no end of line", end="")
        rpc.shutdown()
        """,
    )
    (tmp_path / "beside.py").write_text("value = 'found'")
    logs = tmp_path / "logs"
    done = _run("-n", "2", f"--log-dir={logs}", program, "--epochs", "3", "-n", "9")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "worker0 | no end of line",
        "worker0 | worker0 2 1.0 ['--epochs', '3', '-n', '9'] found",
        "worker1 | no end of line",
        "worker1 | worker1 2 2.0 ['--epochs', '3', '-n', '9'] found",
    ]
    (secret,) = {line.partition(" | ")[2] for line in done.stderr.splitlines()}
    assert len(secret) == 64
    assert "worker1 2 2.0" in (logs / "attempt0" / "worker1.stdout").read_text()


def test_the_first_failure_is_shown_once(tmp_path: Path) -> None:
    done = _run("-n", "3", _program(tmp_path, _FAILING, failure="raise ValueError('bad batch')"))
    assert done.returncode == 1
    assert "worker1 | hello" in done.stdout
    first, *trace, last = done.stderr.splitlines()
    assert first.startswith("farprop run: worker1 (process ")
    assert first.endswith(") failed: ValueError: bad batch")
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[1].endswith('program.py", line 5, in <module>')
    assert trace[-1] == "ValueError: bad batch"
    assert last == "farprop run: then it ended worker0, worker2."


def test_a_worker_that_is_killed(tmp_path: Path) -> None:
    done = _run("-n", "2", _program(tmp_path, _FAILING, failure="os.kill(os.getpid(), signal.SIGKILL)"))
    assert done.returncode == 137
    assert ") failed: it was ended by signal 9 (SIGKILL). Somebody killed it" in done.stderr
    assert "Traceback" not in done.stderr


def test_restarts(tmp_path: Path) -> None:
    """The store outlives the workers. What those of the first attempt have written there stopped those of the next."""
    program = _program(
        tmp_path,
        """
        import os
        import torch
        import torch.distributed as dist
        import farprop.distributed
        import farprop.rpc as rpc
        dist.init_process_group("farprop")
        rpc.init_rpc()
        rank = rpc.get_worker_info().id
        total = torch.ones(1)
        dist.all_reduce(total)
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if rank == 1 and attempt == "0":
            raise ValueError("the first time")
        value = rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(total, rank)).item()
        print("done", attempt, rank, value)
        rpc.shutdown()
        dist.destroy_process_group()
        """,
    )
    done = _run("-n", "2", "--restarts", "2", program)
    assert done.returncode == 0, done.stderr
    last = [line for line in done.stdout.splitlines() if "done 1" in line]  # worker 0 may be done the first time, too
    assert sorted(last) == ["worker0 | done 1 0 2.0", "worker1 | done 1 1 3.0"]
    assert "ValueError: the first time" in done.stderr
    assert done.stderr.count("farprop run: all workers are started again (1 of 2 times after a failure)") == 1


def test_ctrl_c_and_a_worker_that_ignores_it(tmp_path: Path) -> None:
    """Under nohup, so that the end of the terminal is no reason to end."""
    program = _program(
        tmp_path,
        """
        import os, signal
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGINT, lambda *_: print("I refuse", flush=True))
        print(os.getpid(), flush=True)
        while True:
            signal.pause()
        """,
    )
    with _running("-n", "2", program, before=("nohup",)) as launcher:
        pids = [int(line.split("|")[1]) for line in _lines(launcher, 2)]
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGINT)
        assert _lines(launcher, 1) == ["worker0 | I refuse\n"]
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=SECONDS)
    assert launcher.returncode == 130
    assert said.strip() == "farprop run: Ctrl-C: the workers are told to end; again kills them"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    program = _program(tmp_path, "import os, signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    with _running("-n", "1", program) as launcher:
        (line,) = _lines(launcher, 1)
        worker = os.pidfd_open(int(line.split("|")[1]))
        launcher.kill()
    with os.fdopen(worker):
        assert select.select([worker], [], [], SECONDS)[0] == [worker]
    for pipes in Path(tempfile.gettempdir()).glob("farprop-run-*"):  # nobody is left who could remove them
        shutil.rmtree(pipes)


def test_two_hosts(hosts: Hosts, tmp_path: Path) -> None:
    """The secret by file; the store and the addresses are found without names of hosts."""
    program = _program(
        tmp_path,
        """
        import torch
        import farprop.rpc as rpc
        rpc.init_rpc()
        rank = rpc.get_worker_info().id
        print("done", rpc.rpc_sync(f"worker{1 - rank}", torch.add, args=(torch.ones(1), rank)).item())
        rpc.shutdown()
        """,
    )
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET)
    options = ["--nnodes=2", f"--rdzv-endpoint={hosts.address(0)}:29500", f"--secret-file={secret}", program]
    launchers = [
        subprocess.Popen(["ip", "netns", "exec", name, *COMMAND, *options], text=True, stdout=subprocess.PIPE)
        for name in hosts.names[:2]
    ]
    outputs = [launcher.communicate(timeout=SECONDS)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0]
    assert sorted("".join(outputs).splitlines()) == ["worker0 | done 1.0", "worker1 | done 2.0"]


def test_another_launcher_of_this_host_may_open_the_store_at_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers on one host both see that the port is free. One of them has to ask the other's store."""
    monkeypatch.setenv("FARPROP_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = _config([f"--rdzv-backend={BACKEND}", "--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}"])
    other = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    handler = create_handler(
        RendezvousParameters(BACKEND, config.rdzv_endpoint, "job", 2, 2, None, **config.rdzv_configs)
    )
    assert not handler.is_closed()  # it has read the state
    del other


# Wrong usage


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["-n", "2"], "needs a program"),
        (["-n", "2", "missing.py"], "There is no file 'missing.py'. For a module, write -m before its name."),
        (["--nnodes", "2", __file__], "--nnodes 2 needs a place where the hosts meet: --rdzv-endpoint HOST:PORT"),
        (["--nnodes", "2", "--rdzv-endpoint=localhost:1", __file__], "A job on several hosts needs a secret"),
        (["-n", "many", __file__], "Unsupported nproc_per_node value: many"),
        (["--nnodes=2", "--rdzv-endpoint=no.such.host.invalid:1", __file__], "can't be found"),
    ],
)
def test_wrong_usage(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    try:
        assert main(["run", *words]) in (1, 2)
    finally:
        os.environ.clear()
        os.environ.update(before)
    said = capsys.readouterr().err
    assert text in said
    assert "Traceback" not in said
