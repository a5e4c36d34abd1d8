"""Calls under plain ``torch.profiler``: at the caller, and at a callee that records all of its threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import farprop.rpc as rpc
from farprop._torch import profile_of_all_threads
from tests.profiler.pipeline import double
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport

_running: list[Any] = []


def _start() -> None:
    profile = profile_of_all_threads()
    profile.__enter__()
    _running.append(profile)


def _stop() -> list[str]:
    profile = _running.pop()
    profile.__exit__(None, None, None)
    return _names(profile.function_events)


def _names(events: Any) -> list[str]:
    return sorted(event.name for event in events if event.name.startswith("rpc_"))


def _call_all() -> None:
    x = torch.ones(2)
    assert rpc.rpc_sync("worker1", double, args=(x,)).tolist() == [2, 2]
    rpc.rpc_async("worker1", double, args=(x,)).wait()
    rpc.rpc_async("worker1", torch.add, args=(x, 1)).wait()
    rpc.remote("worker1", double, args=(x,)).to_here()
    for call in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
        with pytest.raises(RuntimeError, match="could not find destination"):
            call("nobody", double)  # its event must have an end, or the profile is spoilt


def _profiled() -> list[str]:
    with torch.autograd.profiler.profile(use_kineto=True) as profile:
        _call_all()
    return _names(profile.function_events)


def test_calls_have_the_names_of_torchs_own() -> None:
    with cluster(2) as job:
        job.run(1, _start)
        assert job.run(0, _profiled) == [
            "rpc_async#aten::add(worker0 -> worker1)",
            "rpc_async#double(worker0 -> worker1)",
            "rpc_remote#double(worker0 -> worker1)",
            "rpc_sync#double(worker0 -> worker1)",
        ]
        runs = job.run(1, _stop)
        assert runs.count("rpc_run#double(worker0 -> worker1)") == 3
        assert "rpc_run#to_here(worker0 -> worker1)" in runs
        job.run(0, _call_all)  # and without a profile
