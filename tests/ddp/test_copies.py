"""Copies and pickles of a DistributedDataParallel."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist

from farprop.errors import UsageError
from farprop.nn.parallel import DistributedDataParallel
from tests.ddp.models import Net, assert_gradients, batch, share, step
from tests.groups.kinds import default_group
from tests.support.workers import run_workers


def through_a_file(ddp: DistributedDataParallel) -> DistributedDataParallel:
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def train(ddp: DistributedDataParallel, right: Net, rank: int, size: int, numbers: range) -> None:
    for number in numbers:
        ddp.zero_grad()
        right.zero_grad()
        ddp(share(batch(size, number), rank)).mean().backward()
        right(batch(size, number)).mean().backward()
        assert_gradients(ddp.module, right)
        step(ddp.module)
        step(right)


def copied(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True, "bucket_cap_mb": 0.0001}):
            for make in (copy.deepcopy, through_a_file):
                right = Net()
                ddp = DistributedDataParallel(Net(), **options)
                train(ddp, right, rank, size, range(2))
                other = make(ddp)
                assert all(a.equal(b) for a, b in zip(ddp.parameters(), other.parameters(), strict=True))
                assert other.static_graph == ddp.static_graph
                train(other, right, rank, size, range(2, 5))
                # Training the copy has not changed the original.
                assert not any(a.equal(b) for a, b in zip(ddp.parameters(), other.parameters(), strict=True))


def test_a_copy_can_be_trained():
    run_workers(copied, 2, (2,))


def elsewhere(rank: int, size: int) -> None:
    with default_group("gloo", rank, size):
        half = dist.new_group([rank], use_local_synchronization=True)
        with pytest.raises(UsageError, match="another group than the default one .* save its state_dict"):
            copy.deepcopy(DistributedDataParallel(Net(), process_group=half))
        file = io.BytesIO()
        torch.save(DistributedDataParallel(Net()), file)
        file.seek(0)
    with pytest.raises(UsageError, match="There is no process group"):
        torch.load(file, weights_only=False)


def test_copies_on_other_groups_raise():
    run_workers(elsewhere, 2, (2,))
