"""What goes wrong is said, on every rank, and nobody hangs."""

from __future__ import annotations

import os
import re
import secrets
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import farprop.distributed  # noqa: F401 - it registers the backend
from farprop.errors import (
    CollectiveError,
    CollectiveMismatchError,
    RankLostError,
    RendezvousError,
    UsageError,
)
from tests.groups.kinds import default_group
from tests.groups.native.layouts import environment
from tests.groups.store_group import job_store
from tests.support.workers import run_workers

LAYOUT = pytest.mark.parametrize("layout", ["one", "tcp", "two"])


def error_of(call, *args, **kwargs) -> Exception:
    with pytest.raises(CollectiveError) as caught:
        call(*args, **kwargs)
    return caught.value


def mismatch(rank: int, size: int, what: str) -> str:
    with default_group("farprop", rank, size):
        dist.barrier()
        odd = rank == size - 1
        if what == "order":
            error = error_of(dist.broadcast if odd else dist.all_reduce, torch.ones(3), *([0] if odd else []))
        elif what == "shape":
            error = error_of(dist.all_reduce, torch.ones(4 if odd else 3))
        elif what == "dtype":
            error = error_of(dist.all_reduce, torch.ones(3, dtype=torch.float64 if odd else torch.float32))
        elif what == "operation":
            error = error_of(dist.all_reduce, torch.ones(3), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)
        else:
            error = error_of(dist.broadcast, torch.ones(3), 1 if odd else 0)
        assert isinstance(error, CollectiveMismatchError), error
        # The group is broken, and says why.
        again = error_of(dist.all_reduce, torch.ones(3))
        assert str(again) == str(error)
        return str(error)


SAYINGS = {
    "order": ("allreduce of float32 [3] with SUM", "broadcast of float32 [3] from rank 0"),
    "shape": ("allreduce of float32 [3] with SUM", "allreduce of float32 [4] with SUM"),
    "dtype": ("allreduce of float32 [3] with SUM", "allreduce of float64 [3] with SUM"),
    "operation": ("allreduce of float32 [3] with SUM", "allreduce of float32 [3] with MAX"),
    "root": ("broadcast of float32 [3] from rank 0", "broadcast of float32 [3] from rank 1"),
}


@pytest.mark.parametrize(
    ("layout", "what"), [*(("one", what) for what in SAYINGS), ("tcp", "shape"), ("tcp", "order"), ("two", "root")]
)
def test_mismatches_are_named(layout, what):
    for text in run_workers(mismatch, 3, (3, what), environment(layout, 3)):
        first, second = SAYINGS[what]
        assert f"called {first}" in text
        assert f"rank 2 called {second}" in text or f"Rank 2 called {second}" in text
        assert "collective 2 of their group" in text


def survive(rank: int, size: int, way: str) -> str:
    store = job_store(rank, size)
    dist.init_process_group("farprop", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 1:
        # Not before the others wait for it.
        store.wait(["waiting/0", "waiting/2"])
        os.kill(os.getpid(), signal.SIGKILL)
    store.set(f"waiting/{rank}", "")
    x = torch.ones(300_000)
    if way == "async":
        error = error_of(dist.all_reduce(x, async_op=True).wait)
    elif way == "message":
        error = error_of(dist.recv, x, 1)
    else:
        error = error_of(dist.all_reduce, x)
    assert isinstance(error, RankLostError)
    assert isinstance(error_of(dist.barrier), RankLostError)
    store.set(f"known/{rank}", "")
    if rank == 0:
        store.wait(["known/2"])
    dist.destroy_process_group()
    return str(error)


@pytest.mark.parametrize(
    ("layout", "way"), [("one", "sync"), ("one", "async"), ("one", "message"), ("tcp", "sync"), ("two", "sync")]
)
def test_a_killed_rank_is_named_everywhere(layout, way):
    with pytest.raises(AssertionError) as caught:
        run_workers(survive, 3, (3, way), environment(layout, 3), check=False)
    # That one was killed is the only problem.
    assert re.fullmatch(r"worker1 \(pid \d+\) was ended by SIGKILL before it answered", str(caught.value))


def late(rank: int, size: int) -> str | None:
    store = job_store(rank, size)
    dist.init_process_group("farprop", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=2))
    dist.barrier()
    if rank == 1:
        store.wait(["gave up/0", "gave up/2"])  # it comes when it is too late
    error = error_of(dist.all_reduce, torch.ones(3))
    store.set(f"gave up/{rank}", "")
    store.wait([f"gave up/{other}" for other in range(size)])
    dist.destroy_process_group()
    store.set(f"left/{rank}", "")
    if rank == 0:
        store.wait([f"left/{other}" for other in range(size)])
    return f"{type(error).__name__}: {error}"


@LAYOUT
def test_who_did_not_come_is_named(layout):
    first, second, third = run_workers(late, 3, (3,), environment(layout, 3))
    # Whoever is first to give up names it, and tells the others.
    assert any(text.startswith("CollectiveTimeoutError") for text in (first, third))
    for text in (first, third):
        assert "timed out in allreduce of float32 [3]" in text
        assert "it waited for rank 1" in text
    assert "gave up" in second


def left(rank: int, size: int) -> None:
    store = job_store(rank, size)
    dist.init_process_group("farprop", store=store, rank=rank, world_size=size)
    x = torch.ones(1)
    dist.all_reduce(x)
    if rank == 1:
        dist.destroy_process_group()
        store.set("left", "")
        store.wait(["done"])
        return
    store.wait(["left"])
    error = error_of(dist.all_reduce, x)
    assert isinstance(error, RankLostError)
    assert "Rank 1 has left the group" in str(error)
    group = dist.group.WORLD
    dist.destroy_process_group()
    with pytest.raises(UsageError, match="destroyed"):
        group.allreduce([x])
    store.set("done", "")


@pytest.mark.parametrize("layout", ["one", "tcp"])
def test_a_rank_that_left(layout):
    run_workers(left, 2, (2,), environment(layout, 2))


def bad_arguments(rank: int, size: int) -> None:
    with default_group("farprop", rank, size) as group:
        x = torch.ones(3)
        with pytest.raises(UsageError, match="can't be reduced with"):
            dist.all_reduce(x, dist.ReduceOp.BXOR)
        with pytest.raises(UsageError, match="the output for rank"):
            dist.all_gather([torch.ones(2) for _ in range(size)], x)
        with pytest.raises(UsageError, match="no rank 7"):
            group.broadcast([x], 7)
        with pytest.raises(UsageError, match="CPU tensors"):
            dist.all_reduce(torch.ones(3, device="meta"))
        # All of that was said before anything was sent.
        dist.all_reduce(x)
        assert x.equal(torch.full((3,), float(size)))


def test_bad_arguments_break_nothing():
    run_workers(bad_arguments, 2, (2,))


def uneven_exchange(rank: int, size: int) -> str:
    with default_group("farprop", rank, size):
        outputs = [torch.zeros(2), torch.zeros(3 if rank == 0 else 2)]
        with pytest.raises((CollectiveError, UsageError)) as caught:
            dist.all_to_all(outputs, [torch.ones(2), torch.ones(2)])
        return str(caught.value)


def test_an_exchange_that_does_not_fit():
    first, second = run_workers(uneven_exchange, 2, (2,))
    assert first == "Rank 1 sends 2 elements to rank 0, which expects 3."
    assert "failed on rank 0" in second
    assert first in second


def absent(rank: int, size: int) -> None:
    store = job_store(rank, size)
    if rank == 0:
        with pytest.raises(RendezvousError, match="Rank 1 of 2 has not called init_process_group"):
            dist.init_process_group("farprop", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1))
        store.set("done", "")
    store.wait(["done"])


def test_a_rank_that_does_not_start():
    run_workers(absent, 2, (2,), check=False)


def refused(rank: int, size: int, words: str) -> None:
    """No rank gets into the group, and each one's error has these words."""
    store = job_store(rank, size)
    with pytest.raises(RendezvousError, match=words):
        dist.init_process_group("farprop", store=store, rank=rank, world_size=size)
    store.set(f"done/{rank}", "")
    store.wait([f"done/{other}" for other in range(size)])


def test_ranks_that_share_no_secret():
    environments = [{"FARPROP_SECRET": secrets.token_hex(16)} for _ in range(2)]
    run_workers(refused, 2, (2, "different secrets"), environments, check=False)


def destroyed_early(rank: int, size: int) -> None:
    store = job_store(rank, size)
    dist.init_process_group("farprop", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.destroy_process_group()
        assert "destroyed before it was done" in str(error_of(work.wait))
        store.set("destroyed", "")
        store.wait(["told"])
    else:
        store.wait(["destroyed"])
        assert "Rank 0 gave up" in str(error_of(dist.all_reduce, torch.ones(1)))
        store.set("told", "")
        dist.destroy_process_group()


@LAYOUT
def test_a_group_that_is_destroyed_too_early(layout):
    run_workers(destroyed_early, 2, (2,), environment(layout, 2))


def ends_without_a_word(rank: int, size: int) -> None:
    dist.init_process_group("farprop", store=job_store(rank, size), rank=rank, world_size=size)
    for _ in range(20):
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("layout", ["one", "tcp"])
def test_programs_that_just_end(layout):
    run_workers(ends_without_a_word, 3, (3,), environment(layout, 3), check=False, full_exit=True)


def threads_end(rank: int, size: int) -> None:
    before = threading.active_count()
    with default_group("farprop", rank, size):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        assert threading.active_count() > before


def test_nothing_is_left_behind():
    run_workers(threads_end, 2, (2,))
