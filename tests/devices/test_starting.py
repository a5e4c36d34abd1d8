"""Invalid device maps are refused when the options are made, or at the rendezvous."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop.protocol.roster import Entry
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.device_maps import check_device_maps
from tests.devices import functions as fn
from tests.devices.jobs import init
from tests.support.workers import run_workers

Options = rpc.TensorPipeRpcBackendOptions


def test_a_map_has_to_be_one_to_one() -> None:
    for device_map in ({"cuda:0": "cuda:1", "cuda:1": "cuda:1"}, {"cuda:0": "cpu", "cuda:1": "cpu"}):
        with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping, trying to map cuda:1 and"):
            Options(device_maps={"worker1": device_map})
        with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping, trying to map cuda:1 and"):
            Options().set_device_map("worker1", device_map)


def test_additions_to_a_map_must_keep_it_one_to_one() -> None:
    options = Options(device_maps={"worker1": {"cuda:0": "cuda:1"}})
    with pytest.raises(ValueError, match="`set_device_map` only supports 1-to-1 mapping, trying to map cuda:0 to"):
        options.set_device_map("worker1", {"cuda:0": "cuda:2"})
    with pytest.raises(ValueError, match="only supports 1-to-1 mapping"):
        options.set_device_map("worker1", {"cuda:2": "cuda:1"})
    options.set_device_map("worker1", {"cuda:1": "cuda:2"})
    assert options.device_maps["worker1"] == {
        torch.device("cuda:0"): torch.device("cuda:1"),
        torch.device("cuda:1"): torch.device("cuda:2"),
    }


def entry(rank: int, maps: dict[str, dict[str, str]], cuda_devices: int = 2, devices: Any = ()) -> Entry:
    return Entry(
        f"w{rank}", rank, 2, f"i{rank}", ("127.0.0.1", 5), "u", "n", "host", 9, True, device_maps=maps,
        devices=list(devices), cuda_devices=cuda_devices,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (entry(0, {"w9": {"cuda:0": "cuda:0"}}), entry(1, {}), "w0 has invalid target node names.*called w9"),
        (entry(0, {}, devices=["cuda:0", "cuda:0"]), entry(1, {}), "w0 has duplicated devices"),
        (entry(0, {}, devices=["cuda:7"]), entry(1, {}), "w0 has devices with invalid indices"),
        (entry(0, {"w1": {"cuda:0": "cpu", "cuda:1": "cpu"}}), entry(1, {}), "w0 has duplicated target devices"),
        (entry(0, {"w1": {"cuda:2": "cuda:0"}}), entry(1, {}), "w0 has source devices with invalid indices"),
        (entry(0, {}), entry(1, {"w0": {"cuda:0": "cuda:2"}}), "w1 has target devices with invalid indices"),
        (entry(0, {"w1": {"cuda:1": "cuda:0"}}, devices=["cuda:0"]), entry(1, {}), "w0 has unexpected source"),
        (entry(0, {"w1": {"cuda:1": "cuda:0"}}), entry(1, {}, devices=["cuda:1"]), "w0 has unexpected target"),
    ],
)
def test_invalid_maps_are_reported(first: Entry, second: Entry, says: str) -> None:
    problem = check_device_maps([first, second], is_static=True)
    assert problem is not None
    assert re.search(says, problem, re.DOTALL), problem


def test_valid_maps_are_accepted() -> None:
    good = [entry(0, {"w1": {"cuda:0": "cuda:1", "cuda": "cuda:0", "cpu": "cpu"}}), entry(1, {"w0": {"xpu:0": "cpu"}})]
    assert check_device_maps(good, is_static=True) is None
    assert check_device_maps([entry(0, {"later": {"cuda:0": "cuda:1"}})], is_static=False) is None
    assert "to the CPU" in str(check_device_maps([entry(0, {"later": {"cuda:0": "cpu"}})], is_static=False))
    assert Entry.from_json(good[0].to_json()) == good[0]


def _unknown_worker(rank: int) -> None:
    with pytest.raises(ValueError, match="worker0 has invalid target node names in its device maps"):
        init(rank, 2, {"worker7": {"lazy:0": "lazy:1"}} if rank == 0 else {})


def test_a_map_for_an_unknown_worker_is_an_error_on_all_workers() -> None:
    run_workers(_unknown_worker, 2)


def _join_later(rank: int) -> None:
    if rank == 0:
        init(0, None, {"worker1": {"lazy:0": "lazy:1"}})
        assert fn.finished.wait(30)
    else:
        init(1, None, {"worker0": {"lazy:1": "lazy:3"}})
        while "worker0" not in {info.name for info in current_agent().get_worker_infos()}:
            pass  # get_worker_infos asks the store
        there = rpc.rpc_sync("worker0", fn.pass_on, ("worker1", torch.ones(3)))
        assert there.tolist() == [3.0, 3.0, 3.0]
        mapped = torch.ones(3).to("lazy:1")
        assert rpc.rpc_sync("worker0", fn.device, (mapped,)) == "lazy:3"
        assert str(rpc.rpc_sync("worker0", fn.double, (mapped,)).device) == "lazy:1"
        # From the worker that joined first to the one that joined later.
        assert rpc.rpc_sync("worker0", fn.device_at, ("worker1", "lazy:0")) == ("lazy:1", "lazy:0")
        rpc.rpc_sync("worker0", fn.finish)
    rpc.shutdown()


def test_maps_in_dynamic_groups() -> None:
    run_workers(_join_later, 2)
