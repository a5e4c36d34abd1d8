"""What torch builds on process groups works with groups written in Python."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from farprop.distributed import LonelyProcessGroup
from tests.groups.kinds import default_group
from tests.support.workers import run_workers

# Torch's DistributedDataParallel imports it when it is made.
IMPORTED_IN_WORKERS = ("torch._dynamo",)

# Lonely groups have one rank; the others are made of send and recv, of three collectives, and of a wrapped group.
JOBS = [("lonely", 1), ("messages", 3), ("three", 2), ("counting", 2)]


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).double()


def batch(size: int) -> torch.Tensor:
    torch.manual_seed(6)
    return torch.randn(2 * size, 4, dtype=torch.float64)


def gradients_of_one_process(size: int) -> list[torch.Tensor]:
    alone = model()
    alone(batch(size)).pow(2).mean().backward()
    return [parameter.grad for parameter in alone.parameters()]


def torch_ddp(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size):
        for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
            ddp = TorchDDP(model(), **options)
            for _ in range(2):
                ddp.zero_grad()
                ddp(batch(size)[2 * rank : 2 * rank + 2]).pow(2).mean().backward()
                for parameter, right in zip(ddp.parameters(), gradients_of_one_process(size), strict=True):
                    torch.testing.assert_close(parameter.grad, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "size"), JOBS)
def test_torch_ddp(kind, size):
    run_workers(torch_ddp, size, (size, kind))


def functional_collectives(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size) as group:
        x = torch.full((size, 2), float(rank + 1))
        total = sum(range(1, size + 1))
        assert (functional.all_reduce(x, "sum", group) + 0).equal(torch.full((size, 2), float(total)))
        gathered = functional.all_gather_single(x, 0, group) + 0
        assert gathered.equal(torch.cat([torch.full((size, 2), float(other + 1)) for other in range(size)]))
        assert (functional.reduce_scatter_single(x, "sum", 0, group) + 0).equal(torch.full((1, 2), float(total)))
        exchanged = functional.all_to_all_single(x, None, None, group) + 0
        assert exchanged.equal(torch.stack([torch.full((2,), float(other + 1)) for other in range(size)]))
        assert (functional.broadcast(x, 0, group) + 0).equal(torch.ones(size, 2))
        one, two = functional.all_reduce_coalesced([x, 2 * x], "sum", group)
        assert (one + two).equal(torch.full((size, 2), 3.0 * total))


@pytest.mark.parametrize(("kind", "size"), JOBS)
def test_functional_collectives(kind, size):
    run_workers(functional_collectives, size, (size, kind))


def dtensor(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size):
        mesh = init_device_mesh("cpu", (size,))
        whole = torch.arange(4.0 * size).reshape(2 * size, 2)
        sharded = distribute_tensor(whole, mesh, [Shard(0)])
        assert sharded.to_local().equal(whole[2 * rank : 2 * rank + 2])
        assert sharded.full_tensor().equal(whole)
        assert sharded.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local().equal(whole)
        assert (sharded.t() @ sharded).full_tensor().equal(whole.t() @ whole)


@pytest.mark.parametrize(("kind", "size"), [("lonely", 1), ("messages", 2), ("three", 2), ("counting", 2)])
def test_dtensor(kind, size):
    run_workers(dtensor, size, (size, kind), check=False)  # torch caches meshes, and so groups


def fsdp2(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size):
        sharded = model()
        mesh = init_device_mesh("cpu", (size,))
        for layer in sharded:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        sharded(batch(size)[2 * rank : 2 * rank + 2]).pow(2).mean().backward()
        for parameter, right in zip(sharded.parameters(), gradients_of_one_process(size), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), right, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("kind", "size"), [("lonely", 1), ("messages", 2), ("three", 2), ("counting", 2)])
def test_fsdp2(kind, size):
    run_workers(fsdp2, size, (size, kind), check=False)  # as above


def test_torch_ddp_needs_no_default_group():
    ddp = TorchDDP(model(), process_group=LonelyProcessGroup())
    ddp(batch(1)).pow(2).mean().backward()
    for parameter, right in zip(ddp.parameters(), gradients_of_one_process(1), strict=True):
        assert parameter.grad.equal(right)


def subgroups(rank: int, size: int) -> None:
    with default_group("messages", rank, size):
        group = dist.new_group([0, 2])
        if rank in (0, 2):
            x = torch.full((1,), float(rank))
            dist.all_reduce(x, group=group)
            assert x.item() == 2
            dist.broadcast(x.fill_(rank), 2, group=group)
            assert x.item() == 2


def test_subgroups():
    run_workers(subgroups, 3, (3,))
