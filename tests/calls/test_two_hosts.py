"""Two hosts: network namespaces joined by a cable that the test can cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from tests.calls import functions as f

pytestmark = pytest.mark.one_transport  # it chooses its own

ROOT = Path(__file__).resolve().parents[2]
SECRET = "the-secret-of-two-hosts-0123456789abcdef"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _why_not() -> str | None:
    if shutil.which("ip") is None:
        return "there is no `ip` here (Debian: iproute2)"
    probe = f"farprop-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces can't be made here: {made.stderr.strip()}"
    _ip("netns", "delete", probe)
    return None


class Hosts:
    """Host 0 at 10.213.77.1 and host 1 at 10.213.77.2."""

    def __init__(self) -> None:
        self.names = [f"farprop-{os.getpid()}-{i}" for i in range(2)]
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", "fp0", "netns", self.names[0], "type", "veth", "peer", "name", "fp1", "netns", self.names[1])
        for i, name in enumerate(self.names):
            _ip("-n", name, "address", "add", f"10.213.77.{i + 1}/30", "dev", f"fp{i}")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", f"fp{i}", "up")

    def cut(self) -> None:
        _ip("-n", self.names[1], "link", "set", "fp1", "down")

    def mend(self) -> None:
        _ip("-n", self.names[1], "link", "set", "fp1", "up")

    def start(self, host: int, role: str, directory: Path, **env: str) -> subprocess.Popen[str]:
        words = ["ip", "netns", "exec", self.names[host], sys.executable, "-c"]
        code = f"from tests.calls.test_two_hosts import main; main({host}, {role!r}, {str(directory)!r})"
        return subprocess.Popen(
            [*words, code],
            cwd=ROOT,
            env={**os.environ, "MASTER_ADDR": "10.213.77.1", "MASTER_PORT": "29500", **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        for name in self.names:
            _ip("netns", "delete", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    made = Hosts()
    yield made
    made.close()


def _end(process: subprocess.Popen[str]) -> str:
    try:
        text, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        text, _ = process.communicate()
        raise AssertionError(f"did not end:\n{text}") from None
    assert process.returncode == 0, text
    return text


def _mark(directory: str, name: str) -> None:
    Path(directory, name).touch()


def _await_mark(directory: str | Path, name: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(directory, name).exists():
        assert time.monotonic() < deadline, name
        time.sleep(0.005)


def main(rank: int, role: str, directory: str) -> None:
    """What runs on a host."""
    torch.set_num_threads(1)
    if role == "refused":
        with pytest.raises(RuntimeError, match="share no secret.*FARPROP_SECRET"):
            rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        return
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    assert rpc.api.current_agent()._own_entry.tcp[0] == f"10.213.77.{rank + 1}"
    if rank == 0:
        tensor = torch.rand(1_000_000)
        assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(tensor,)), tensor)
        assert rpc.rpc_sync("worker1", f.own_name) == "worker1"
        if role == "cut":
            waiting = rpc.rpc_async("worker1", f.sleep, args=(1.0,), timeout=3)
            _mark(directory, "cut now")
            _await_mark(directory, "is cut")
            for call in (waiting.wait, lambda: rpc.rpc_sync("worker1", f.noop, timeout=0.5)):
                with pytest.raises(RpcTimeoutError):
                    call()
            _mark(directory, "mend now")
            _await_mark(directory, "is mended")
            # TCP sends again what was lost, after a while.
            assert rpc.rpc_sync("worker1", f.own_name, timeout=50) == "worker1"
    rpc.shutdown()


def test_calls_between_hosts(hosts: Hosts, tmp_path: Path) -> None:
    processes = [hosts.start(host, "calls", tmp_path, FARPROP_SECRET=SECRET) for host in range(2)]
    for process in processes:
        _end(process)


def test_hosts_without_a_secret_refuse_and_say_how_to_set_one(hosts: Hosts, tmp_path: Path) -> None:
    processes = []
    for host in range(2):
        place = tmp_path / str(host)
        place.mkdir(mode=0o700)
        processes.append(hosts.start(host, "refused", tmp_path, XDG_RUNTIME_DIR=str(place)))
    for process in processes:
        _end(process)


def test_a_cut_cable_costs_the_deadline_and_mends(hosts: Hosts, tmp_path: Path) -> None:
    processes = [hosts.start(host, "cut", tmp_path, FARPROP_SECRET=SECRET) for host in range(2)]
    _await_mark(tmp_path, "cut now")
    hosts.cut()
    _mark(str(tmp_path), "is cut")
    _await_mark(tmp_path, "mend now")
    hosts.mend()
    _mark(str(tmp_path), "is mended")
    for process in processes:
        _end(process)
