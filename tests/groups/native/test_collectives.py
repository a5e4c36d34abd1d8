"""Every collective of the backend farprop, in shared memory, over TCP, and over both."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from farprop.distributed.native.shm_arena import SLOT_BYTES
from tests.groups import test_collectives as every_group
from tests.groups import test_torch_on_groups as torch_on_groups
from tests.groups.kinds import default_group
from tests.groups.native.layouts import SEVERAL_HOSTS, environment
from tests.support.workers import run_workers

# Torch's DistributedDataParallel imports it when it is made.
IMPORTED_IN_WORKERS = ("torch._dynamo",)

JOBS = [("one", 1), ("one", 2), ("one", 3), ("one", 4), ("tcp", 2), ("tcp", 3), ("tcp", 4), ("two", 3), ("two", 4)]
JOBS += [(layout, 4) for layout in SEVERAL_HOSTS]
JOB = pytest.mark.parametrize(("layout", "size"), JOBS)
SOME = pytest.mark.parametrize(("layout", "size"), [("one", 3), ("tcp", 3), ("two", 4), ("3+1", 4), ("1+1+2", 4)])


@JOB
def test_collectives(layout, size):
    run_workers(every_group.collectives, size, (size, "farprop"), environment(layout, size))


@SOME
def test_operations(layout, size):
    (right, *_), (ours, *others) = (
        run_workers(every_group.operations, size, (size, kind), environment(layout, size))
        for kind in ("gloo", "farprop")
    )
    for results in (ours, *others):
        for name, a, b in zip(every_group.OPERATIONS, right, results, strict=True):
            assert a.equal(b), name


@SOME
def test_sparse(layout, size):
    run_workers(every_group.sparse, size, (size, "farprop"), environment(layout, size))


@SOME
def test_coalesced(layout, size):
    run_workers(every_group.coalesced, size, (size, "farprop"), environment(layout, size))


@SOME
def test_torch_ddp(layout, size):
    run_workers(torch_on_groups.torch_ddp, size, (size, "farprop"), environment(layout, size))


@SOME
def test_functional_collectives(layout, size):
    run_workers(torch_on_groups.functional_collectives, size, (size, "farprop"), environment(layout, size))


def test_dtensor():
    run_workers(torch_on_groups.dtensor, 2, (2, "farprop"), check=False)  # torch caches meshes, and so groups


def test_fsdp2():
    run_workers(torch_on_groups.fsdp2, 2, (2, "farprop"), check=False)  # as above


def premultiplied(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        for count in (5, 100_000, COUNT):  # one per algorithm: one-shot, reduce-scatter and all-gather, chain
            x = every_group.mine(rank, count)
            dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
            right = sum(every_group.mine(other, count) for other in range(size)) / 2
            torch.testing.assert_close(x, right)
            x = every_group.mine(rank, count)
            dist.reduce(x, 1, dist._make_nccl_premul_sum(0.5))
            torch.testing.assert_close(x, right if rank == 1 else every_group.mine(rank, count))


@SOME
def test_premultiplied(layout, size):
    run_workers(premultiplied, size, (size,), environment(layout, size))


# More than fits into a slot, and not a round number. Values are small whole numbers, so sums are exact.
COUNT = 2 * SLOT_BYTES // 4 + 4099


def numbers(rank: int, count: int) -> torch.Tensor:
    return ((torch.arange(count) + 3) * (rank + 1) % 97).float()


def large(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        everybody = [numbers(other, COUNT) for other in range(size)]
        own, total = everybody[rank], sum(everybody)
        last = size - 1

        x = own.clone()
        dist.all_reduce(x)
        assert x.equal(total)
        much = [numbers(other, 2 * COUNT) for other in range(size)]
        x = much[rank].clone()
        dist.all_reduce(x, dist.ReduceOp.AVG)
        assert x.equal(sum(much) / size)
        x = own.clone()
        dist.reduce(x, last)
        assert x.equal(total if rank == last else own)
        x = own.clone()
        dist.broadcast(x, last)
        assert x.equal(everybody[last])

        outputs = [torch.empty(COUNT) for _ in range(size)]
        dist.all_gather(outputs, own)
        assert all(a.equal(b) for a, b in zip(outputs, everybody, strict=True))
        outputs = [torch.empty(COUNT) for _ in range(size)] if rank == last else None
        dist.gather(own, outputs, last)
        assert rank != last or all(a.equal(b) for a, b in zip(outputs, everybody, strict=True))
        x = torch.empty(COUNT)
        dist.scatter(x, everybody if rank == last else None, last)
        assert x.equal(own)
        dist.reduce_scatter(x, [own + other for other in range(size)])
        assert x.equal(total + size * rank)
        outputs = [torch.empty(COUNT) for _ in range(size)]
        dist.all_to_all(outputs, [own + other for other in range(size)])
        assert all(output.equal(source + rank) for output, source in zip(outputs, everybody, strict=True))


@pytest.mark.parametrize(
    ("layout", "size"), [("one", 2), ("one", 3), ("two", 3), *((layout, 4) for layout in SEVERAL_HOSTS)]
)
def test_large(layout, size):
    run_workers(large, size, (size,), environment(layout, size))


def uneven(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        # From empty to larger than a slot.
        counts = [other * other * 200_000 for other in range(size)]
        outputs = [torch.full((count,), -1.0) for count in counts]
        dist.all_gather(outputs, numbers(rank, counts[rank]))
        assert all(x.equal(numbers(other, counts[other])) for other, x in enumerate(outputs))
        x = torch.empty(counts[rank])
        dist.reduce_scatter(x, [numbers(rank, count) for count in counts])
        assert x.equal(sum(numbers(other, counts[rank]) for other in range(size)))
        outputs = [torch.empty(counts[other]) for other in range(size)]
        dist.all_to_all(outputs, [numbers(other, counts[rank]) for other in range(size)])
        assert all(x.equal(numbers(rank, counts[other])) for other, x in enumerate(outputs))


@SOME
def test_uneven(layout, size):
    run_workers(uneven, size, (size,), environment(layout, size))


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def dtypes(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        for dtype in (*DTYPES, torch.float8_e4m3fn, torch.uint16):
            values = [torch.arange(7).add(other).to(torch.float32).to(dtype) for other in range(size)]
            x = values[rank].clone()
            dist.broadcast(x, 1)
            assert x.view(torch.uint8).equal(values[1].view(torch.uint8)), dtype
            outputs = [torch.zeros(7).to(dtype) for _ in range(size)]
            dist.all_gather(outputs, values[rank])
            for output, value in zip(outputs, values, strict=True):
                assert output.view(torch.uint8).equal(value.view(torch.uint8)), dtype
            if dtype in DTYPES:
                x = values[rank].clone()
                dist.all_reduce(x)
                right = values[0].clone()
                for value in values[1:]:
                    right += value
                assert x.equal(right), dtype


@SOME
def test_dtypes(layout, size):
    run_workers(dtypes, size, (size,), environment(layout, size))


def bits(rank: int, size: int) -> list[torch.Tensor]:
    with default_group("farprop", rank, size):
        results = []
        for count in (1000, 300_001):
            x = torch.randn(count, generator=torch.Generator().manual_seed(rank))
            dist.all_reduce(x)
            results.append(x)
        return results


@pytest.mark.parametrize("layout", ["one", "tcp", "two"])
def test_results_are_bitwise_equal_on_all_ranks_and_in_all_runs(layout):
    first, second = (run_workers(bits, 4, (4,), environment(layout, 4)) for _ in range(2))
    for results in (*first, *second):
        assert all(a.equal(b) for a, b in zip(results, first[0], strict=True))


def not_contiguous(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        x = torch.full((4, 6), float(rank + 1)).t()[::2]
        x.requires_grad_()
        dist.all_reduce(x)
        assert x.equal(torch.full((3, 4), 3.0))
        outputs = list(torch.zeros(4, 3, size).unbind(-1))
        dist.all_gather(outputs, torch.full((3, 4), float(rank)).t())
        assert all(output.equal(torch.full((4, 3), float(other))) for other, output in enumerate(outputs))
        empty = torch.zeros(0, 3)
        dist.all_reduce(empty)
        scalar = torch.tensor(float(rank))
        dist.all_reduce(scalar)
        assert scalar.item() == 1


def test_non_contiguous_tensors():
    run_workers(not_contiguous, 2, (2,))


def asynchronous(rank: int, size: int) -> None:
    with default_group("farprop", rank, size) as group:
        tensors = [torch.full((count,), float(rank)) for count in (3, 700_000, 1, 40_000)]
        works = [dist.all_reduce(x, async_op=True) for x in tensors]
        # A blocking collective runs after all that were started before it.
        last = torch.ones(1)
        dist.all_reduce(last)
        assert all(work.is_completed() and work.is_success() for work in works)
        assert all(work.wait() for work in works)
        for x in tensors:
            assert x.equal(torch.full_like(x, float(sum(range(size)))))
        then = group.allreduce([torch.ones(2)]).get_future().then(lambda future: future.value()[0] * 2)
        assert then.wait().equal(torch.full((2,), 2.0 * size))


@SOME
def test_asynchronous(layout, size):
    run_workers(asynchronous, size, (size,), environment(layout, size))


def subgroups(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        subgroups_of_two = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        group = subgroups_of_two[rank % 2]
        x = torch.full((1,), float(rank))
        dist.all_reduce(x, group=group)
        assert x.item() == (2 if rank % 2 == 0 else 4)
        objects = [None, None]
        dist.all_gather_object(objects, rank, group=group)
        assert objects == [rank % 2, rank % 2 + 2]
        dist.destroy_process_group(group)
        dist.barrier()


@pytest.mark.parametrize("layout", ["one", "two"])
def test_subgroups(layout):
    run_workers(subgroups, 4, (4,), environment(layout, 4))


def groups_of_halves(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        half, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        # Only the ranks of one half make each group, so both groups get the same name.
        alone, parts = dist.new_subgroups(group_size=1, group=half)
        again = dist.new_group(dist.get_process_group_ranks(half))
        assert [part.size() for part in parts if part is alone] == [1]
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=alone)
        assert x.item() == rank
        dist.all_reduce(x, group=again)
        assert x.item() == (4 if rank % 2 else 2)


def test_groups_that_halves_of_a_job_make():
    run_workers(groups_of_halves, 4, (4,))
