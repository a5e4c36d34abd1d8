"""Every collective of torch on every kind of group. Gloo's results are the expected ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.groups.kinds import default_group
from tests.support.workers import run_workers

KINDS = ("gloo", "messages", "three", "counting")
OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(torch.Size(shape).numel())
    return (torch.arange(count) + rank + 1).to(dtype).reshape(shape)


def collectives(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size) as group:
        everybody = [mine(other, 3, 2) for other in range(size)]
        total = sum(everybody)

        for dtype in (torch.float64, torch.float16, torch.int64, torch.uint8):
            x = mine(rank, 3, 2, dtype=dtype)
            dist.all_reduce(x)
            torch.testing.assert_close(x, total.to(dtype))
        x = mine(rank, 2, 3).t()  # not contiguous
        dist.all_reduce(x)
        torch.testing.assert_close(x, sum(mine(other, 2, 3) for other in range(size)).t())

        for root in range(size):
            x = mine(rank, 3, 2)
            dist.broadcast(x, root)
            assert x.equal(everybody[root])
            x = mine(rank, 3, 2)
            dist.reduce(x, root)
            if rank == root:
                assert x.equal(total)
            outputs = [torch.zeros(3, 2) for _ in range(size)] if rank == root else None
            dist.gather(mine(rank, 3, 2), outputs, root)
            if outputs is not None:
                assert all(a.equal(b) for a, b in zip(outputs, everybody, strict=True))
            x = torch.zeros(3, 2)
            dist.scatter(x, everybody if rank == root else None, root)
            assert x.equal(everybody[rank])

        outputs = [torch.zeros(3, 2) for _ in range(size)]
        dist.all_gather(outputs, mine(rank, 3, 2))
        assert all(a.equal(b) for a, b in zip(outputs, everybody, strict=True))
        x = torch.zeros(3 * size, 2)
        dist.all_gather_single(x, mine(rank, 3, 2))
        assert x.equal(torch.cat(everybody))

        x = torch.zeros(2)
        dist.reduce_scatter(x, [mine(rank + other, 2) for other in range(size)])
        assert x.equal(sum(mine(rank + other, 2) for other in range(size)))
        x = torch.zeros(2)
        dist.reduce_scatter_single(x, mine(rank, 2 * size))
        assert x.equal(sum(mine(other, 2 * size) for other in range(size))[2 * rank : 2 * rank + 2])

        # Rank r sends r + s + 1 elements to rank s. Gloo accepts that only in one tensor.
        rows = (lambda a, b: 2) if kind in ("gloo", "counting") else (lambda a, b: a + b + 1)
        outputs = [torch.zeros(rows(other, rank)) for other in range(size)]
        dist.all_to_all(outputs, [mine(10 * rank + other, rows(rank, other)) for other in range(size)])
        assert all(x.equal(mine(10 * other + rank, rows(other, rank))) for other, x in enumerate(outputs))
        splits = [rank + other + 1 for other in range(size)]
        x = torch.zeros(sum(splits), 2)
        dist.all_to_all_single(x, torch.full((sum(splits), 2), float(rank)), splits, splits)
        assert x.equal(torch.cat([torch.full((count, 2), float(other)) for other, count in enumerate(splits)]))
        x = torch.zeros(size)
        dist.all_to_all_single(x, mine(rank, size))
        assert x.equal(torch.tensor([float(other + rank + 1) for other in range(size)]))

        objects = [None] * size
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
        assert objects == [{"rank": other, "text": "x" * other} for other in range(size)]
        objects = [{"from": rank}]
        dist.broadcast_object_list(objects, size - 1)
        assert objects == [{"from": size - 1}]

        work = dist.all_reduce(torch.ones(2), async_op=True)
        assert work.wait()
        assert work.is_completed()
        [x] = dist.all_reduce(torch.ones(2), async_op=True).get_future().wait()
        assert x.equal(torch.full((2,), float(size)))
        dist.barrier()
        assert group.size() == size


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_collectives(kind, size):
    run_workers(collectives, size, (size, kind))


def operations(rank: int, size: int, kind: str) -> list[list[torch.Tensor]]:
    with default_group(kind, rank, size):
        results = []
        for name in OPERATIONS:
            if kind == "gloo" and name == "AVG":  # Gloo has no AVG
                x = mine(rank, 5, dtype=torch.int32)
                dist.all_reduce(x)
                x //= size
            else:
                x = mine(rank, 5, dtype=torch.int32)
                dist.all_reduce(x, getattr(dist.ReduceOp, name))
            results.append(x)
        if kind == "messages":
            x = mine(rank, 5)
            dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
            torch.testing.assert_close(x, sum(mine(other, 5) for other in range(size)) / 2)
        return results


def test_operations():
    right, ours = (run_workers(operations, 3, (3, kind))[0] for kind in ("gloo", "messages"))
    for name, a, b in zip(OPERATIONS, right, ours, strict=True):
        assert a.equal(b), name


def sparse(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size):
        dense = torch.zeros(6, 2)
        dense[rank] = rank + 1
        dense[5] = 1
        if rank == 1:
            dense.zero_()  # a rank without elements
        x = dense.to_sparse(1)
        dist.all_reduce(x)
        right = dense.clone()
        dist.all_reduce(right)
        assert x.to_dense().equal(right)


@pytest.mark.parametrize("kind", ["gloo", "messages"])
def test_sparse(kind):
    run_workers(sparse, 3, (3, kind))


def coalesced(rank: int, size: int, kind: str) -> None:
    with default_group(kind, rank, size) as group:
        tensors = [mine(rank, 2), mine(rank, 3, dtype=torch.float64)]
        group.allreduce_coalesced(tensors).wait()
        assert tensors[1].equal(sum(mine(other, 3, dtype=torch.float64) for other in range(size)))
        outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
        group.allgather_coalesced(outputs, [mine(rank, 2), mine(rank, 3)]).wait()
        assert all(outputs[other][1].equal(mine(other, 3)) for other in range(size))
        x, y = torch.zeros(2 * size), torch.zeros(size)
        group.allgather_into_tensor_coalesced([x, y], [mine(rank, 2), mine(rank, 1)]).wait()
        assert y.equal(torch.arange(size) + 1.0)
        x, y = torch.zeros(2), torch.zeros(1)
        group.reduce_scatter_tensor_coalesced([x, y], [mine(rank, 2 * size), mine(rank, size)]).wait()
        assert y.equal(sum(mine(other, size) for other in range(size))[rank : rank + 1])


@pytest.mark.parametrize("kind", ["messages", "three"])
def test_coalesced(kind):
    run_workers(coalesced, 3, (3, kind))


def messages(rank: int, size: int) -> None:
    with default_group("messages", rank, size) as group:
        if rank == 0:
            # A pending message with the user's tag is not mixed up with those of collectives.
            x = torch.zeros(2)
            receive = dist.irecv(x, 1)
            dist.barrier()
            receive.wait()
            assert x.equal(torch.ones(2))
        else:
            dist.barrier()
            dist.send(torch.ones(2), 0)
        requests = [dist.P2POp(dist.isend, torch.full((1,), float(rank)), 1 - rank)]
        x = torch.zeros(1)
        requests.append(dist.P2POp(dist.irecv, x, 1 - rank))
        for request in dist.batch_isend_irecv(requests):
            request.wait()
        assert x.item() == 1 - rank
        group.monitored_barrier()


def test_messages():
    run_workers(messages, 2, (2,))
