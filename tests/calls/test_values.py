"""Values in calls between real workers. ``test_codec.py`` covers the kinds of tensors."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.runtime.agent_registry import current_agent
from tests.calls import functions as f
from tests.support.workers import cluster

MIB = 1 << 20


def _sizes() -> None:
    for count in (0, 1, 9, 8191, 8192, 8193, 16384, 100_000, 1_000_003, 20 * MIB):
        tensor = torch.arange(count, dtype=torch.float32)
        assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(tensor,)), tensor), count
    for size in (0, 1, 65535, 65536, 65537, 5 * MIB, 70 * MIB):
        data = bytes(bytearray(range(256))) * (size // 256) + bytes(size % 256)
        assert rpc.rpc_sync("worker1", f.identity, args=(data,)) == data, size


def test_tensors_of_all_sizes(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _sizes)


def _mixed() -> None:
    large, small = torch.rand(300, 1000), torch.rand(3)
    value = {
        "views": [large[1:], large[:, 5], large.t()],
        "small": small,
        "many": [torch.rand(20000) for _ in range(30)],
    }
    got = rpc.rpc_sync("worker1", f.identity, args=(value,))
    assert torch.equal(got["views"][0], large[1:])
    assert torch.equal(got["views"][1], large[:, 5])
    assert torch.equal(got["views"][2], large.t())
    got["views"][2].zero_()
    assert not got["views"][0].any()
    for theirs, ours in zip(got["many"], value["many"], strict=True):
        assert torch.equal(theirs, ours)


def test_views_and_many_buffers(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _mixed)


kept: list[torch.Tensor] = []


def _keep(tensor: torch.Tensor) -> None:
    kept.append(tensor)


def _kept_sums() -> list[float]:
    return [float(tensor.sum()) for tensor in kept]


def _drop_kept() -> None:
    kept.clear()
    gc.collect()


def _keep_received_tensors() -> None:
    for i in range(20):
        rpc.rpc_sync("worker1", _keep, args=(torch.full((MIB // 4,), float(i)),))
    assert rpc.rpc_sync("worker1", _kept_sums) == [float(i) * MIB / 4 for i in range(20)]
    rpc.rpc_sync("worker1", _drop_kept)
    results = [rpc.rpc_sync("worker1", f.identity, args=(torch.full((MIB // 4,), float(i)),)) for i in range(20)]
    assert [float(r[0]) for r in results] == list(range(20))
    assert [float(r[-1]) for r in results] == list(range(20))


def test_kept_tensors_do_not_change(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _keep_received_tensors)


def _pool_is_reused_and_limited() -> None:
    tensor = torch.rand(MIB)
    for _ in range(50):
        rpc.rpc_sync("worker1", f.identity, args=(tensor,))
    agent = current_agent()
    assert agent._pool.free_bytes <= 10 * MIB
    for size in range(1, 30):
        rpc.rpc_sync("worker1", f.identity, args=(torch.rand(size * MIB // 4),))
    assert agent._pool.free_bytes <= 10 * MIB
    agent._pool.validate()
    # Segments that were dropped here are unmapped on the other worker.
    assert rpc.rpc_sync("worker1", _mapped_bytes) < 60 * MIB


def _receive_and_drop() -> None:
    held = [rpc.rpc_sync("worker1", torch.zeros, args=(4 * MIB,)) for _ in range(4)]
    assert rpc.rpc_sync("worker1", _lent_bytes) >= 64 * MIB
    held.clear()


def _lent_bytes() -> int:
    return sum(connection.sender.lent_bytes for connection in current_agent()._accepted.all())


def _wait_until_segments_are_returned() -> None:
    deadline = time.monotonic() + 20
    while _lent_bytes() > 16 * MIB:
        assert time.monotonic() < deadline, _lent_bytes()
        time.sleep(0.001)


@pytest.mark.one_transport
def test_dropped_segments_are_returned_without_another_call() -> None:
    with cluster(2) as c:
        c.run(0, _receive_and_drop)
        c.run(1, _wait_until_segments_are_returned)


def _mapped_bytes() -> int:
    total = 0
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "memfd:farprop" in line:
                low, _, high = line.split()[0].partition("-")
                total += int(high, 16) - int(low, 16)
    return total


@pytest.mark.one_transport
def test_the_shared_memory_pool_has_a_limit() -> None:
    with cluster(2, {"FARPROP_SHM_POOL_BYTES": str(10 * MIB)}) as c:
        c.run(0, _pool_is_reused_and_limited)


def _no_memory() -> None:
    import os

    def refuse(*_: Any) -> int:
        raise OSError(12, "no memory")

    os.memfd_create = refuse  # type: ignore[assignment]
    tensor = torch.rand(MIB)
    assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(tensor,)), tensor)


@pytest.mark.one_transport
def test_tensors_go_over_the_socket_without_shared_memory() -> None:
    with cluster(2) as c:
        c.run(0, _no_memory)


def _too_large() -> None:
    with pytest.raises(RuntimeError, match="FARPROP_MAX_MESSAGE_BYTES=1000000"):
        rpc.rpc_sync("worker1", f.identity, args=(torch.zeros(MIB),))
    with pytest.raises(RuntimeError, match="FARPROP_MAX_MESSAGE_BYTES=1000000"):
        rpc.rpc_sync("worker1", f.identity, args=(bytes(MIB),))
    with pytest.raises(RuntimeError, match="FARPROP_MAX_MESSAGE_BYTES=1000000"):
        rpc.rpc_sync("worker1", torch.zeros, args=(MIB,))
    assert rpc.rpc_sync("worker1", f.add, args=(1,)) == 2


def test_a_message_over_the_limit_is_refused_on_either_side(env: dict[str, str]) -> None:
    with cluster(2, {**env, "FARPROP_MAX_MESSAGE_BYTES": "1000000"}) as c:
        c.run(0, _too_large)


def _requires_grad_is_kept() -> None:
    leaf = torch.rand(3, requires_grad=True)
    got = rpc.rpc_sync("worker1", f.identity, args=(leaf,))
    assert got.requires_grad
    (got * 2).sum().backward()
    assert torch.equal(got.grad, torch.full((3,), 2.0))
    assert rpc.rpc_sync("worker1", torch.mul, args=(leaf, 2)).requires_grad
    parameter = rpc.rpc_sync("worker1", f.identity, args=(torch.nn.Parameter(torch.rand(3)),))
    assert isinstance(parameter, torch.nn.Parameter)


def test_requires_grad_is_kept(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _requires_grad_is_kept)
