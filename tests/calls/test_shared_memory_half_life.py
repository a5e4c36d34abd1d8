"""After a burst of large messages, the shared memory is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import farprop.rpc as rpc
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport

_MIB = 1 << 20


def _shared_bytes() -> int:
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = "memfd:farprop" in line
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def _burst() -> int:
    data = torch.ones(4 * _MIB)  # 16 MiB
    futures = [rpc.rpc_async("worker1", f.identity, args=(data,)) for _ in range(12)]
    results = [future.wait() for future in futures]
    assert all(result.sum() == data.numel() for result in results)  # pages that nobody has read don't count
    return _shared_bytes()


def _wait_for_little() -> None:
    # Each side may keep what it calls few, and has mapped what the other one keeps.
    wait_until(lambda: _shared_bytes() <= 64 * _MIB, "little shared memory", seconds=30)


def test_shared_memory_of_a_burst_is_given_back() -> None:
    with cluster(2) as job:
        assert job.run(0, _burst) > 150 * _MIB
        for rank in (0, 1):
            job.run(rank, _wait_for_little)
        assert job.run(0, _burst) > 150 * _MIB
