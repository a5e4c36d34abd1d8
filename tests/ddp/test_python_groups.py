"""DistributedDataParallel on groups written in Python: both kinds of work, and the calls that it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.futures import Future

from farprop.distributed import CountingProcessGroup, LonelyProcessGroup, Work, work_from_future
from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Net, assert_gradients, batch, share
from tests.groups.kinds import default_group
from tests.support.workers import run_workers


class OwnWork(Work):
    """A work with its own methods, whose calls the group counts."""

    def __init__(self, group: OneRank, outputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._group = group
        self.complete(outputs)

    def wait(self, *timeout: Any) -> bool:
        self._group.waits += 1
        return super().wait(*timeout)

    def get_future(self) -> Future[Any]:
        self._group.futures += 1
        return super().get_future()


class OneRank(LonelyProcessGroup):
    """Its works are of its own class, or made from futures."""

    def __init__(self, wraps: bool) -> None:
        super().__init__()
        self._wraps = wraps
        self.waits = self.futures = self.broadcasts = 0

    def _work(self, outputs: list[torch.Tensor]) -> Work:
        if not self._wraps:
            return OwnWork(self, outputs)
        future: Future[Any] = Future()
        future.set_result(outputs)
        return work_from_future(future)

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        self.broadcasts += 1
        return self._work(super().broadcast(tensors, opts).result())

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        return self._work(super().allreduce(tensors, opts).result())

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        return self._work(super().allgather(outputs, inputs, opts).result())


@pytest.mark.parametrize("wraps", [False, True], ids=["subclass", "wrapper"])
@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("init_sync", [True, False])
def test_one_rank(wraps, views, init_sync):
    group = OneRank(wraps)
    ours, right = Net(), Net()
    ddp = DistributedDataParallel(
        ours, process_group=group, gradient_as_bucket_view=views, init_sync=init_sync, bucket_cap_mb=0.0001
    )
    assert (group.broadcasts > 0) == init_sync
    for number in range(3):
        ddp.zero_grad()
        right.zero_grad()
        ddp(batch(1, number)).mean().backward()
        right(batch(1, number)).mean().backward()
        assert_gradients(ours, right, 0)
    if views:
        assert all(parameter.grad._base is not None for parameter in ours.parameters())
    if not wraps:
        assert group.futures > 3  # one per bucket
        assert group.waits > 0  # at least for the order of the rebuilt buckets


def test_the_collectives_of_an_iteration():
    group = CountingProcessGroup(LonelyProcessGroup())
    layer = nn.Linear(4, 4)
    ddp = DistributedDataParallel(layer, process_group=group)
    group.calls.clear()
    group.bytes.clear()
    for _ in range(3):
        ddp(torch.ones(1, 4)).sum().backward()
    # One bucket in each iteration, and once the order and sizes of buckets.
    assert group.calls == {"allreduce": 3, "broadcast": 2}
    assert group.bytes["allreduce"] == 3 * sum(parameter.nbytes for parameter in layer.parameters())


@pytest.mark.parametrize(("options", "sizes"), [({}, [3, 12, 12, 9]), ({"bucket_cap_mb": 25}, [27, 9])])
def test_bucket_sizes(options, sizes):
    """By default a third of all gradients, so that most of them are reduced while the backward pass runs."""
    group = CountingProcessGroup(LonelyProcessGroup())
    layers = [nn.Linear(1024, 768, bias=False) for _ in range(12)]  # 3 MiB each
    ddp = DistributedDataParallel(nn.ModuleList(layers), process_group=group, **options)
    sent: list[int] = []
    allreduce = group.allreduce

    def noting(tensors: Any, opts: Any = None) -> Any:
        sent.append(sum(tensor.nbytes for tensor in tensors) >> 20)
        return allreduce(tensors, opts)

    ddp.module.forward = lambda x: sum(layer(x).sum() for layer in layers)
    group.allreduce = noting
    for _ in range(2):
        ddp(torch.ones(1, 1024)).backward()
    assert sent[-len(sizes) :] == sizes


def on_several(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size):
        for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
            ours, right = Net(), Net()
            ddp = DistributedDataParallel(ours, **options)
            for number in range(2):
                ddp.zero_grad()
                right.zero_grad()
                ddp(share(batch(size, number), rank)).mean().backward()
                right(batch(size, number)).mean().backward()
                assert_gradients(ours, right)


@pytest.mark.parametrize(("kind", "size"), [("messages", 3), ("three", 2), ("counting", 2)])
def test_several_ranks(kind, size):
    run_workers(on_several, size, (size, kind))
