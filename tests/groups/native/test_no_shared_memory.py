"""A rank that can't make shared memory takes part nevertheless."""

from __future__ import annotations

import resource

import pytest
import torch
import torch.distributed as dist

from tests.groups.kinds import default_group
from tests.support.workers import run_workers


def reduce_without_memory(rank: int, size: int, without: tuple[int, ...]) -> None:
    if rank in without:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (32 << 10, hard))
    with default_group("farprop", rank, size):
        for length in (1, 300_000):
            x = torch.full((length,), float(rank + 1))
            dist.all_reduce(x)
            assert x.eq(sum(range(1, size + 1))).all()


@pytest.mark.parametrize("without", [(0,), (1,), (0, 1, 2)])
def test_a_rank_that_cannot_make_shared_memory(without):
    run_workers(reduce_without_memory, 3, (3, without))
