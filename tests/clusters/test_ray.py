"""Workers on a Ray cluster of three nodes, which are processes of this host."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import farprop.launch.ray
import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RendezvousError, UsageError
from tests.clusters.split_model import CHECKPOINT_STEPS, Training, train_alone

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).parents[2]
WORKERS = 6
STEPS = 30
# Not 127.0.0.1: Ray replaces it by an address that others reach.
HOSTS = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Three nodes with room for nine workers, and this process as a driver of the first."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Cluster()
    try:
        for host in HOSTS:
            made.add_node(num_cpus=3, object_store_memory=80 << 20, node_ip_address=host, include_dashboard=False)
        ray.init(address=made.address, log_to_driver=False, _node_ip_address=HOSTS[0])
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


def _wait_for(what: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_training_goes_on_after_the_loss_of_a_node(cluster: Cluster) -> None:
    errors: list[ConnectionLostError] = []
    with farprop.launch.ray.workers(WORKERS, max_restarts=-1) as pool:
        before = [worker.call(_node_id) for worker in pool]
        assert sorted(Counter(before).values()) == [2, 2, 2]
        victim = next(node for node in cluster.worker_nodes if node.node_id in before)
        training = Training(pool)

        def kill_a_node(step: int) -> None:
            if step == 2 * CHECKPOINT_STEPS + 2 and not errors:
                cluster.remove_node(victim, allow_graceful=False)

        while len(training.losses) < STEPS:
            try:
                training.run(STEPS, kill_a_node)
            except ConnectionLostError as error:
                errors.append(error)
                assert training.step >= 2 * CHECKPOINT_STEPS
                pool.wait_until_up()
        after = [worker.call(_node_id) for worker in pool]
        print("errors:", *(f"{type(error).__name__}: {error}" for error in errors), sep="\n  ")
        print("losses:", training.losses[0], "...", training.losses[-1])
    assert errors
    assert victim.node_id not in after
    moved = [name for name, old, new in zip(range(WORKERS), before, after, strict=True) if old != new]
    assert len(moved) == 2
    assert training.losses == pytest.approx(train_alone(WORKERS, STEPS), rel=1e-4)
    _wait_for(lambda: ray.available_resources().get("CPU") == 6)  # the pool has given back what it had


def test_worker_that_is_not_restarted(cluster: Cluster) -> None:
    with farprop.launch.ray.workers(2, resources={"CPU": 1, "memory": 1 << 20}) as pool:
        assert pool.map(abs, range(-4, 0)) == [4, 3, 2, 1]
        assert [info.name for info in rpc.workers()] == ["driver", "worker0", "worker1"]
        victim = pool[1].call(os.getpid)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(ConnectionLostError):
            while True:
                pool[1].call(os.getpid)
        with pytest.raises(ConnectionLostError, match="worker1 has ended for good"):
            pool.wait_until_up()
        assert pool[0].call(abs, -1) == 1
    with pytest.raises(UsageError, match="does not run"):
        pool.wait_until_up()


def test_no_room(cluster: Cluster) -> None:
    with pytest.raises(RendezvousError, match="Ray had no room for 2 workers with {'CPU': 5} each"):
        farprop.launch.ray.workers(2, resources={"CPU": 5}, timeout=1).start()
    with pytest.raises(RendezvousError, match="(?s)worker0 has ended for good.*FARPROP_RESTRICTED"):
        farprop.launch.ray.workers(1, runtime_env={"env_vars": {"FARPROP_RESTRICTED": "1"}}).start()
    _wait_for(lambda: ray.available_resources().get("CPU") == 9)


def test_the_page(cluster: Cluster, tmp_path: Path) -> None:
    (text,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "ray.md").read_text(), re.MULTILINE | re.DOTALL)
    script = tmp_path / "script.py"
    joined = f'ray.init(address="{cluster.address}", log_to_driver=False, _node_ip_address="{HOSTS[0]}")'
    script.write_text(text.replace("ray.init()", joined))
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == re.findall(r"print\(.*\)  # (.+)$", text, re.MULTILINE)


_DRIVER = """
import os, signal, sys
import ray
import farprop.launch.ray

ray.init(address=sys.argv[1], log_to_driver=False, _node_ip_address="127.0.0.2")
pool = farprop.launch.ray.workers(2, max_restarts=-1).start()
print(*[worker.call(os.getpid) for worker in pool], flush=True)
signal.pause()
"""


def _is_alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_workers_end_with_their_driver_however_it_ends(cluster: Cluster) -> None:
    command = [sys.executable, "-c", _DRIVER, cluster.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            pids = [int(word) for word in driver.stdout.readline().split()]
            assert len(pids) == 2
            assert all(map(_is_alive, pids))
        finally:
            driver.kill()
    _wait_for(lambda: not any(map(_is_alive, pids)))
