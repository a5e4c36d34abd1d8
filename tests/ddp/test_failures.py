"""Failures, and how training continues after them."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farprop.distributed import FaultyProcessGroup, LonelyProcessGroup
from farprop.errors import InjectedFaultError, ReductionError, UsageError
from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Net, Unused, assert_gradients, batch, share
from tests.groups.kinds import default_group
from tests.support.workers import run_workers


def never_ready(rank: int, size: int, ranks: tuple[int, ...]) -> None:
    with default_group("gloo", rank, size):
        ours, right = Unused(), Unused()
        del ours.never, right.never
        ddp = DistributedDataParallel(ours, bucket_cap_mb=0.0001)
        use = rank not in ranks
        ddp(share(batch(size), rank), use).mean().backward()  # ranks with all gradients don't hang
        if not use:
            with pytest.raises(ReductionError) as caught:
                ddp(share(batch(size), rank), True)
            assert f"Rank {rank}: the last backward pass gave no gradient for 2 of" in str(caught.value)
            assert "sometimes.weight, sometimes.bias" in str(caught.value)
            assert "find_unused_parameters=True" in str(caught.value)
        # All ranks can continue together.
        for number in range(2):
            ddp.zero_grad()
            right.zero_grad()
            ddp(share(batch(size, number), rank), True).mean().backward()
            right(batch(size, number), True).mean().backward()
            assert_gradients(ours, right)


@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 2)], ids=["all", "some"])
def test_a_missing_gradient_raises_in_the_next_forward_pass(ranks):
    # Ranks with all gradients wait for the others, which raise in the next forward pass. A waiting rank is not in a
    # forward pass, so the others reach theirs.
    run_workers(never_ready, 3, (3, ranks))


def failing(rank: int, size: int) -> None:
    with default_group("gloo", rank, size) as group:
        for views in (False, True):
            # Without init_sync the first collective is that of the first bucket. The third iteration's fails.
            faulty = FaultyProcessGroup(group, fail=[5])
            ours, right = Net(), Net()
            ddp = DistributedDataParallel(ours, process_group=faulty, init_sync=False, gradient_as_bucket_view=views)
            for number in range(5):
                ddp.zero_grad()
                right.zero_grad()
                loss = ddp(share(batch(size, number), rank)).mean()
                if number == 2:
                    with pytest.raises(InjectedFaultError, match="Collective 5 of rank"):
                        loss.backward()
                    continue
                loss.backward()
                right(batch(size, number)).mean().backward()
                assert_gradients(ours, right)


def test_training_continues_after_a_failed_collective():
    run_workers(failing, 2, (2,))


def test_delayed_collectives():
    group = FaultyProcessGroup(LonelyProcessGroup(), delay=dict.fromkeys(range(1, 20), 0.002))
    ours, right = Net(), Net()
    ddp = DistributedDataParallel(ours, process_group=group, init_sync=False, bucket_cap_mb=0.0001)
    for number in range(2):
        ddp.zero_grad()
        right.zero_grad()
        ddp(batch(1, number)).mean().backward()
        right(batch(1, number)).mean().backward()
        assert_gradients(ours, right, 0)


def test_a_backward_pass_that_raises():
    ours = Net()
    ddp = DistributedDataParallel(ours, process_group=LonelyProcessGroup())
    handle = ours.first.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(batch(1)).mean().backward()
    handle.remove()
    with pytest.raises(ReductionError, match="first.weight.*raised an error"):
        ddp(batch(1))
    ddp.zero_grad()
    ddp(batch(1)).mean().backward()
    right = Net()
    right(batch(1)).mean().backward()
    assert_gradients(ours, right, 0)


def test_a_backward_pass_that_raises_after_the_module():
    ours = Net()
    ddp = DistributedDataParallel(ours, process_group=LonelyProcessGroup())
    x = batch(1).requires_grad_()
    y = x * 2  # its gradient is computed last
    y.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ddp(y).mean().backward()
    ddp.zero_grad()
    ddp(batch(1)).mean().backward()
    right = Net()
    right(batch(1)).mean().backward()
    assert_gradients(ours, right, 0)


def different(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        text = r"modules of ranks \[1\] differ from the one of rank 0. " + (
            r"The first difference is in parameter 0: rank 0 has weight, \(3, 4\), .*; this rank has weight, \(4, 4\), "
            if rank == 1
            else "This rank has the same parameters as rank 0."
        )
        with pytest.raises(UsageError, match=text):
            DistributedDataParallel(nn.Linear(4, 3 + (rank == 1)))
        with pytest.raises(UsageError, match=r"ranks \[2\].* Ranks have \[2, 2, 1\] parameters"):
            DistributedDataParallel(nn.Linear(4, 3, bias=rank != 2))
        DistributedDataParallel(nn.Linear(4, 3))


def test_ranks_with_different_modules_raise():
    run_workers(different, 3, (3,))


def test_wrong_use_raises():
    group = LonelyProcessGroup()
    with pytest.raises(UsageError, match="no process group"):
        DistributedDataParallel(nn.Linear(1, 1))
    with pytest.raises(UsageError, match="not needed"):
        DistributedDataParallel(nn.ReLU(), process_group=group)
    with pytest.raises(UsageError, match="not initialized yet"):
        DistributedDataParallel(nn.LazyLinear(2), process_group=group)
    with pytest.raises(ValueError, match="Leave it out"):
        DistributedDataParallel(nn.Linear(1, 1), device_ids=[0], process_group=group)
    ddp = DistributedDataParallel(nn.Linear(1, 1), process_group=group)
    with pytest.raises(UsageError, match="save its state_dict"):
        copy.deepcopy(ddp)
    with pytest.raises(TypeError, match="callable"):
        ddp.register_comm_hook(None, 1)
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(UsageError, match="once"):
        ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    with pytest.raises(UsageError, match="has to return a torch.futures.Future"):
        ddp(torch.ones(1, 1)).sum().backward()


def test_set_static_graph_raises_after_the_first_forward_pass():
    ddp = DistributedDataParallel(Net(), process_group=LonelyProcessGroup())
    loss = ddp(batch(1)).mean()
    with pytest.raises(UsageError, match="before training loop starts"):
        ddp._set_static_graph()
    loss.backward()
    with pytest.raises(UsageError, match="before the first forward pass"):
        ddp._set_static_graph()
    assert not ddp.static_graph
    ddp = DistributedDataParallel(Net(), process_group=LonelyProcessGroup(), static_graph=True)
    ddp(batch(1)).mean().backward()
    ddp._set_static_graph()  # has no effect, because it is static already


class Sparse(nn.Module):
    """Has an unexpected sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight, sparse=True)


def test_an_unexpected_sparse_gradient():
    ddp = DistributedDataParallel(Sparse(), process_group=LonelyProcessGroup())
    for _ in range(2):  # the error is raised each time
        with pytest.raises(UsageError, match="gradient of weight is sparse"):
            ddp(torch.tensor([1])).sum().backward()


def test_a_dropped_module_is_freed():
    layer = nn.Linear(2, 2)
    ddp = DistributedDataParallel(layer, process_group=LonelyProcessGroup())
    assert layer.weight._post_accumulate_grad_hooks
    del ddp
    assert not layer.weight._post_accumulate_grad_hooks
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
    assert not dist.is_initialized()
