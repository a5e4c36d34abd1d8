"""Coalesced collectives, and other features of groups in Python that newer versions of torch have."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.futures import Future

from farprop.distributed import LonelyProcessGroup, ProcessGroup, Work
from farprop.distributed.work import CoalescedWork, completed
from farprop.errors import CollectiveTimeoutError, InjectedFaultError, UsageError
from tests.groups.kinds import default_group
from tests.support.workers import run_workers

CPU = torch.device("cpu")


def coalescing_manager(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size) as group:
        for is_async in (False, True):
            x, y = torch.full((3,), float(rank)), torch.full((2,), float(rank))
            with _coalescing_manager(group, CPU, async_ops=is_async) as works:
                dist.all_reduce(x)
                dist.all_reduce(y)
            if is_async:
                works.wait()
            total = float(sum(range(size)))
            assert x.equal(torch.full((3,), total))
            assert y.equal(torch.full((2,), total))
        # Collectives that torch does not coalesce by itself.
        z = torch.full((2,), float(rank))
        outputs = [torch.empty(2) for _ in range(size)]
        with _coalescing_manager(group, CPU, async_ops=True) as works:
            dist.broadcast(z, 1)
            dist.all_gather(outputs, torch.full((2,), float(rank)))
        works.wait()
        assert z.equal(torch.ones(2))
        assert [output[0].item() for output in outputs] == [float(other) for other in range(size)]
        # Afterwards, collectives work as before.
        dist.all_reduce(z)
        assert z.equal(torch.full((2,), float(size)))


def ring(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size):
        came = torch.empty(2)
        operations = [
            dist.P2POp(dist.isend, torch.full((2,), float(rank)), (rank + 1) % size),
            dist.P2POp(dist.irecv, came, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        assert came.equal(torch.full((2,), float((rank - 1) % size)))


@pytest.mark.parametrize("kind", ["messages", "three", "counting", "farprop"])
def test_the_coalescing_manager(kind):
    run_workers(coalescing_manager, 2, (2, kind))


@pytest.mark.parametrize("kind", ["messages", "counting", "farprop"])
def test_batches_of_messages(kind):
    run_workers(ring, 3, (3, kind))


def test_a_coalesced_work_completes_with_all_of_its_works():
    first, second = Work(), Work()
    work = CoalescedWork([first, second])
    future = work.get_future()
    tensors = [torch.ones(1), torch.zeros(2)]
    second.complete(tensors[1:])
    assert not work.is_completed()
    with pytest.raises(CollectiveTimeoutError, match="not done after"):
        work.wait(timedelta(milliseconds=1))
    first.complete(tensors[:1])
    assert work.wait()
    assert work.is_success()
    assert [t.shape for t in future.wait()] == [t.shape for t in tensors]
    assert work.result() == tensors


def test_a_coalesced_work_fails_with_one_of_its_works():
    first, second = completed([]), Work()
    second.fail(InjectedFaultError("cut"))
    work = CoalescedWork([first, second])
    with pytest.raises(InjectedFaultError, match="cut"):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), InjectedFaultError)


def test_start_and_end_of_coalescing_must_match():
    group = LonelyProcessGroup()
    with pytest.raises(UsageError, match="without start_coalescing"):
        group.end_coalescing()
    group.start_coalescing()
    with pytest.raises(UsageError, match="twice"):
        group.start_coalescing()
    x = torch.ones(2)
    group.allreduce([x])
    assert group.end_coalescing().result()[0] is x
    assert "allreduce" not in vars(group)


class FromFutures(ProcessGroup):
    """Its works are torch's own, made of futures, which can't wait with a timeout."""

    def __init__(self) -> None:
        super().__init__(0, 1, timedelta(seconds=0.01))
        self.futures: list[Future[Any]] = []
        self.is_late = False

    def _work(self, outputs: Any) -> Any:
        future: Future[Any] = Future()
        if self.is_late:
            self.futures.append(future)
        else:
            future.set_result(outputs)
        return _create_work_from_future(future)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._work(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._work(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        outputs[0][0].copy_(inputs[0])
        return self._work(outputs)


def test_derived_collectives_wait_for_works_of_futures():
    group = FromFutures()
    outputs = [torch.empty(2)]
    group.gather([outputs], [torch.ones(2)], 0).wait()
    assert outputs[0].equal(torch.ones(2))
    group.is_late = True
    with pytest.raises(CollectiveTimeoutError, match="timed out in barrier after 0.01 s"):
        group.barrier()
    for future in group.futures:
        future.set_result([])


def test_a_group_with_a_store():
    store = dist.HashStore()
    for group in (ProcessGroup(store, 1, 3), ProcessGroup(store=store, rank=1, size=3)):
        assert (group.rank(), group.size()) == (1, 3)
        assert group.get_group_store() is store
    for group in (ProcessGroup(1, 3), ProcessGroup(rank=1, size=3, timeout=timedelta(seconds=5))):
        assert (group.rank(), group.size()) == (1, 3)
        assert group.get_group_store() is None
    assert group.timeout == timedelta(seconds=5)
    with pytest.raises(UsageError, match="no rank 3"):
        ProcessGroup(store, 3, 3)
    with pytest.raises(TypeError):
        ProcessGroup(store, 1)


class Named(LonelyProcessGroup):
    """Overrides what newer versions of torch ask groups for."""

    def getRank(self):  # noqa: N802
        return 0

    def getSize(self):  # noqa: N802
        return 1

    def getGroupName(self):  # noqa: N802
        return "a name"

    def getGroupDesc(self):  # noqa: N802
        return "what it is for"


def test_overridden_rank_size_and_names():
    group = Named()
    assert (group.group_name, group.group_desc, group.rank(), group.size()) == ("a name", "what it is for", 0, 1)
    group.abort()
    group.shutdown()
