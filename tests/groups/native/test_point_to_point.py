"""``send`` and ``recv`` on the backend farprop."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from farprop.distributed import NativeProcessGroup
from farprop.errors import CollectiveError, CollectiveTimeoutError, RankLostError
from tests.groups.kinds import default_group
from tests.groups.native.layouts import environment
from tests.groups.store_group import job_store
from tests.support.workers import run_workers

LAYOUT = pytest.mark.parametrize("layout", ["one", "tcp"])


def messages(rank: int, size: int) -> None:
    with default_group("farprop", rank, size) as group:
        # Messages are matched by tag; those of one tag arrive in order.
        if rank == 0:
            for value, tag in ((1, 5), (2, 6), (3, 5)):
                dist.send(torch.full((3,), float(value)), 1, tag=tag)
        elif rank == 1:
            x = torch.zeros(3)
            for value, tag in ((2, 6), (1, 5), (3, 5)):
                dist.recv(x, 0, tag=tag)
                assert x.equal(torch.full((3,), float(value)))

        # From any source.
        x = torch.zeros(2, 2).t()
        if rank == 0:
            sources = [dist.recv(x, tag=9) for _ in range(size - 1)]
            assert sorted(sources) == list(range(1, size))
        else:
            dist.send(torch.full((2, 2), float(rank)), 0, tag=9)

        # More than the socket buffers hold, in both directions at once, and with a receive that was posted early.
        count = 3_000_000
        partner = (rank + 1) % size, (rank - 1) % size
        x = torch.zeros(count)
        receive = dist.irecv(x, partner[1])
        dist.send(torch.full((count,), float(rank)), partner[0])
        receive.wait()
        assert receive.is_completed()
        assert x.equal(torch.full((count,), float(partner[1])))
        dist.send(torch.full((count,), float(rank)), partner[0])
        dist.recv(x, partner[1])

        requests = [dist.P2POp(dist.isend, torch.full((1,), float(rank)), partner[0])]
        requests.append(dist.P2POp(dist.irecv, one := torch.zeros(1), partner[1]))
        for request in dist.batch_isend_irecv(requests):
            request.wait()
        assert one.item() == partner[1]
        empty = torch.zeros(0)
        dist.send(empty, partner[0])
        dist.recv(empty, partner[1])

        objects = [{"rank": rank}]
        if rank == 0:
            dist.send_object_list(objects, 1)
        elif rank == 1:
            dist.recv_object_list(objects, 0)
            assert objects == [{"rank": 0}]
        group.monitored_barrier(timedelta(seconds=30))


@LAYOUT
def test_messages(layout):
    run_workers(messages, 3, (3,), environment(layout, 3))


def mismatched_messages(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        if rank == 0:
            dist.send(torch.ones(3), 1)
            dist.send(torch.ones(2, dtype=torch.int32), 1)
            dist.send(torch.ones(2), 1)
        else:
            x = torch.zeros(2)
            with pytest.raises(CollectiveError, match="Rank 0 sends 12 bytes where 8 are received"):
                dist.recv(x, 0)
            with pytest.raises(CollectiveError, match="a tensor of int32 where one of float32"):
                dist.recv(x, 0)
            # Only the mismatched messages were dropped.
            dist.recv(x, 0)
            assert x.equal(torch.ones(2))
        dist.barrier()


@LAYOUT
def test_messages_of_another_size_or_dtype_raise(layout):
    run_workers(mismatched_messages, 2, (2,), environment(layout, 2))


def receive_without_a_send(rank: int, size: int) -> None:
    with default_group("farprop", rank, size) as group:
        if rank == 0:
            x = torch.zeros(1)
            with pytest.raises(CollectiveTimeoutError, match=r"waited 0.2 s to receive from rank 1, with tag 3"):
                group.recv([x], 1, 3).wait(timedelta(seconds=0.2))
            with pytest.raises(CollectiveTimeoutError, match="Rank 1 failed to pass monitoredBarrier"):
                group.monitored_barrier(timedelta(seconds=0.2))
        dist.barrier()


def test_a_receive_without_a_send_times_out():
    run_workers(receive_without_a_send, 2, (2,))


def monitored_barrier_without_some(rank: int, size: int) -> None:
    with default_group("farprop", rank, size) as group:
        if rank == 0:
            words = "Ranks 1, 2 failed to pass monitoredBarrier. Rank 0 timed out in monitoredBarrier after 2 s"
            with pytest.raises(CollectiveTimeoutError, match=words):
                group.monitored_barrier(timedelta(seconds=2), wait_all_ranks=True)
            # A timeout of 0 is not infinite.
            with pytest.raises(CollectiveTimeoutError, match="Rank 1 failed to pass monitoredBarrier"):
                group.monitored_barrier(timedelta(0))
        elif rank == 3:
            with pytest.raises(CollectiveTimeoutError, match="Rank 3 successfully reached monitoredBarrier, but"):
                group.monitored_barrier(timedelta(seconds=2))
        dist.barrier()
        subgroup = dist.new_group([0, 1])
        if rank == 1:
            dist.destroy_process_group(subgroup)
        elif rank == 0:
            with pytest.raises(RankLostError, match="Rank 1 failed to pass monitoredBarrier. Rank 0 can't reach"):
                subgroup.monitored_barrier(timedelta(seconds=30))


def test_a_monitored_barrier_names_missing_ranks():
    run_workers(monitored_barrier_without_some, 4, (4,))


def with_infinite_timeout(rank: int, size: int) -> None:
    group = NativeProcessGroup(job_store(rank, size), rank, size, timedelta.max)
    x = torch.full((1,), float(rank))
    if rank == 0:
        group.send([x], 1, 0).wait()
    else:
        group.recv([x], 0, 0).wait()
        assert x.item() == 0
    group.shutdown()


def test_an_infinite_timeout():
    run_workers(with_infinite_timeout, 2, (2,))
