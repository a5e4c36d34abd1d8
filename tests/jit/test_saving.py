"""Saving compiled modules that hold references."""

# TorchScript reads these annotations. They must not be strings.
# ruff: noqa: UP006, UP035

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Dict, List, Tuple

import pytest
import torch
from torch import Tensor

import farprop.jit  # noqa: F401
import farprop.rpc as rpc
from farprop.errors import ReferenceLostError, UsageError
from farprop.rpc import RRef
from tests.jit import functions as f
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster, run_workers


class Summing(torch.nn.Module):
    """Has references of several types, some of them in containers."""

    rrefs: List[RRef[Tensor]]
    by_name: Dict[str, RRef[int]]

    def __init__(self, rrefs: List[RRef[Tensor]], by_name: Dict[str, RRef[int]]) -> None:
        super().__init__()
        self.rrefs = rrefs
        self.by_name = by_name

    def forward(self) -> Tuple[Tensor, List[str]]:
        total = torch.zeros(2)
        owners: List[str] = []
        for rref in self.rrefs:
            total += rref.to_here() * self.by_name["factor"].to_here()
            owners.append(rref.owner().name)
            assert rref.owner_name() == rref.owner().name
            if rref.is_owner():
                total += rref.local_value() * 0
        return total, owners


@contextmanager
def enabled() -> Iterator[None]:
    rpc._enable_jit_rref_pickle()
    try:
        yield
    finally:
        rpc._disable_jit_rref_pickle()


def _module() -> torch.jit.ScriptModule:
    rrefs = [rpc.remote("worker1", f.add, args=(torch.ones(2), torch.ones(2))), RRef(torch.full((2,), 5.0))]
    return torch.jit.script(Summing(rrefs, {"factor": RRef(10)}))


def _save() -> bytes:
    file = io.BytesIO()
    with enabled():
        torch.jit.save(_module(), file)
    return file.getvalue()


def _load(saved: bytes) -> torch.jit.ScriptModule:
    return torch.jit.load(io.BytesIO(saved))


def _run(saved: bytes) -> tuple[list[float], list[str]]:
    total, owners = _load(saved)()
    return total.tolist(), owners


EXPECTED = ([70.0, 70.0], ["worker1", "worker0"])


def test_a_saved_module_can_be_loaded_repeatedly_on_every_worker() -> None:
    with cluster(3) as job:
        saved = job.run(0, _save)
        for _ in range(2):
            for rank in range(3):
                assert job.run(rank, _run, saved) == EXPECTED


def _load_twice(saved: bytes) -> None:
    first, second = _load(saved), _load(saved)
    assert first()[0].tolist() == second()[0].tolist() == EXPECTED[0]
    (rref, _) = first.rrefs
    assert isinstance(rref, RRef)
    assert rref.to_here().tolist() == [2.0, 2.0]


def test_a_loaded_module_has_references() -> None:
    with cluster(3) as job:
        job.run(2, _load_twice, job.run(0, _save))


def _owned() -> int:
    return len([one for one in rpc.live_references() if one.role == "owner"])


def test_a_file_keeps_values_until_the_job_ends_and_loaded_references_are_freed() -> None:
    with cluster(3) as job:
        saved = job.run(0, _save)  # the module itself is gone now
        assert job.run(1, _owned) == 1
        job.run(2, _run, saved)
        wait_until(lambda: job.run(1, _held_by) == ["worker0"])
        assert job.run(2, _run, saved) == EXPECTED
    # Leaving the block was a shutdown that neither hung nor found a leak.


def _held_by() -> list[str]:
    return sorted(name for one in rpc.live_references() if one.role == "owner" for name in one.holders)


def _save_without_enabling() -> None:
    module = _module()
    with pytest.raises(UsageError, match="RRef jit pickling is only allowed inside RPC calls.*_enable_jit_rref_pickle"):
        torch.jit.save(module, io.BytesIO())
    with enabled():
        torch.jit.save(module, io.BytesIO())
    with pytest.raises(RuntimeError, match="RRef jit pickling is only allowed inside RPC calls"):
        module.save_to_buffer()


def test_saving_has_to_be_enabled(workers: Cluster) -> None:
    workers.run(0, _save_without_enabling)


class Listing(torch.nn.Module):
    rref: RRef[List[int]]

    def __init__(self) -> None:
        super().__init__()
        self.rref = RRef([1])

    def forward(self) -> int:
        return len(self.rref.to_here())


def _save_a_list() -> None:
    module = torch.jit.script(Listing())
    assert module() == 1
    with enabled(), pytest.raises(UsageError, match=r"RRef\[List\[int\]\]"):
        torch.jit.save(module, io.BytesIO())


def test_references_to_other_types_raise(workers: Cluster) -> None:
    workers.run(0, _save_a_list)


def _after_the_job(rank: int) -> None:
    saved = b""
    for time in range(2):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
        if rank == 0:
            if time == 0:
                saved = _save()
            else:
                with pytest.raises(ReferenceLostError, match="the job that it was saved in has ended"):
                    _load(saved)
        rpc.shutdown()
    if rank == 0:
        with pytest.raises(ReferenceLostError, match="not a worker"):
            _load(saved)


def test_a_file_cannot_be_loaded_after_the_job() -> None:
    run_workers(_after_the_job, 2)


def _load_is_refused(saved: bytes) -> None:
    with pytest.raises(ReferenceLostError, match="worker0 kept it, and is gone|owner worker0"):
        _load(saved)


def test_a_file_cannot_be_loaded_without_the_worker_that_saved_it() -> None:
    with cluster(3) as job:
        saved = job.run(0, _save)
        job.kill(0)
        job.run(2, _load_is_refused, saved)
