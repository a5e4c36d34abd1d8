"""Collectives of the backend farprop in torch's profiles."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from farprop.errors import UsageError
from tests.groups.kinds import default_group
from tests.support.workers import run_workers


def events_of(profiled: profile) -> list[tuple[str, list[list[int]], bool]]:
    events = [event for event in profiled.function_events if event.name.startswith("farprop:")]
    return [(event.name.removeprefix("farprop:"), event.input_shapes, event.is_async) for event in events]


def collectives(rank: int, size: int) -> None:
    with default_group("farprop", rank, size) as group:
        x, parts = torch.ones(2, 3), [torch.ones(2, 3) for _ in range(size)]
        dist.all_reduce(x)  # not profiled
        with profile(record_shapes=True) as profiled:
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.reduce(x, 0)
            dist.all_gather(parts, x)
            dist.gather(x, parts if rank == 0 else None)
            dist.scatter(x, parts if rank == 0 else None)
            dist.reduce_scatter(x, parts)
            dist.all_to_all(parts, [torch.ones(2, 3) for _ in range(size)])
            dist.barrier()
        one, root = [[2, 3]], [[2, 3]] * size if rank == 0 else []
        assert events_of(profiled) == [
            ("all_reduce", one, False),
            ("broadcast", one, False),
            ("reduce", one, False),
            ("all_gather", one, False),
            ("gather", one, False),
            ("scatter", root, False),
            ("reduce_scatter", [[2, 3]] * size, False),
            ("all_to_all", [[2, 3]] * size, False),
            ("barrier", [], False),
        ]
        with profile(record_shapes=True) as profiled:
            dist.all_reduce(x, async_op=True).wait()
        assert events_of(profiled) == [("all_reduce", one, True)]  # its event ended in another thread
        with profile(record_shapes=True) as profiled:
            if rank == 0:
                dist.send(x, 1)
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
                dist.recv(x)
        # A message may have arrived before the receive, or arrive later, in another thread.
        names = ["send", "send"] if rank == 0 else ["recv", "recvAnySource"]
        assert [event[:2] for event in events_of(profiled)] == [(name, one) for name in names]
        # A refused call leaves no event open.
        with profile() as profiled, pytest.raises(UsageError):
            group.all_gather_single(torch.ones(5), x)
        assert events_of(profiled) == []


def test_collectives_in_profiles():
    run_workers(collectives, 2, (2,))
