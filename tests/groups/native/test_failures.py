"""Errors are reported on every rank, and no rank hangs."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import farprop.distributed  # noqa: F401 - it registers the backend
from farprop.distributed.native import bootstrap
from farprop.errors import (
    CollectiveError,
    CollectiveMismatchError,
    RankLostError,
    RendezvousError,
    UsageError,
)
from tests.groups.kinds import default_group, finished_barrier
from tests.groups.native.layouts import environment
from tests.groups.store_group import job_store
from tests.support.workers import run_workers

LAYOUT = pytest.mark.parametrize("layout", ["one", "tcp", "two"])


def error_of(call, *args, **kwargs) -> Exception:
    with pytest.raises(CollectiveError) as caught:
        call(*args, **kwargs)
    return caught.value


def have_the_others_tensors(call, *args) -> None:
    """On a rank that joins too late: the others' tensors may be there before it reads that they gave up. Then it has a
    result, and learns of it at the next collective.
    """
    with suppress(CollectiveError):
        call(*args)


def mismatch(rank: int, size: int, what: str) -> str:
    with default_group("farprop", rank, size):
        finished_barrier()
        is_last = rank == size - 1
        if what == "order":
            error = error_of(dist.broadcast if is_last else dist.all_reduce, torch.ones(3), *([0] if is_last else []))
        elif what == "shape":
            error = error_of(dist.all_reduce, torch.ones(4 if is_last else 3))
        elif what == "dtype":
            error = error_of(dist.all_reduce, torch.ones(3, dtype=torch.float64 if is_last else torch.float32))
        elif what == "operation":
            error = error_of(dist.all_reduce, torch.ones(3), dist.ReduceOp.MAX if is_last else dist.ReduceOp.SUM)
        else:
            error = error_of(dist.broadcast, torch.ones(3), 1 if is_last else 0)
        assert isinstance(error, CollectiveMismatchError), error
        # Later collectives of the failed group raise the same error.
        again = error_of(dist.all_reduce, torch.ones(3))
        assert str(again) == str(error)
        return str(error)


EXPECTED = {
    "order": ("allreduce of float32 [3] with SUM", "broadcast of float32 [3] from rank 0"),
    "shape": ("allreduce of float32 [3] with SUM", "allreduce of float32 [4] with SUM"),
    "dtype": ("allreduce of float32 [3] with SUM", "allreduce of float64 [3] with SUM"),
    "operation": ("allreduce of float32 [3] with SUM", "allreduce of float32 [3] with MAX"),
    "root": ("broadcast of float32 [3] from rank 0", "broadcast of float32 [3] from rank 1"),
}


@pytest.mark.parametrize(
    ("layout", "what"),
    [*(("one", what) for what in EXPECTED), ("tcp", "shape"), ("tcp", "order"), ("two", "root"), ("2+1", "dtype")],
)
def test_both_calls_of_a_mismatch_are_named(layout, what):
    for text in run_workers(mismatch, 3, (3, what), environment(layout, 3)):
        first, second = EXPECTED[what]
        assert f"called {first}" in text
        assert f"rank 2 called {second}" in text or f"Rank 2 called {second}" in text
        assert "collective 2 of their group" in text


def wait_for_a_killed_rank(rank: int, size: int, way: str) -> str:
    store = job_store(rank, size)
    dist.init_process_group("farprop", store=store, rank=rank, world_size=size)
    dist.barrier()
    if rank == 1:
        # When the others wait for it.
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
def test_a_killed_rank_is_named_on_all_other_ranks(layout, way):
    with pytest.raises(AssertionError) as caught:
        run_workers(wait_for_a_killed_rank, 3, (3, way), environment(layout, 3), check=False)
    # The killed rank is the only failure.
    assert re.fullmatch(r"worker1 \(pid \d+\) was ended by SIGKILL before it answered", str(caught.value))


def call_after_the_timeout(rank: int, size: int) -> str | None:
    store = job_store(rank, size)
    dist.init_process_group("farprop", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=2))
    dist.barrier()
    if rank == 1:
        store.wait(["gave up/0", "gave up/2"])  # it joins when it is too late
        have_the_others_tensors(dist.all_reduce, torch.ones(3))
    error = error_of(dist.all_reduce, torch.ones(3))
    store.set(f"gave up/{rank}", "")
    store.wait([f"gave up/{other}" for other in range(size)])
    dist.destroy_process_group()
    store.set(f"left/{rank}", "")
    if rank == 0:
        store.wait([f"left/{other}" for other in range(size)])
    return f"{type(error).__name__}: {error}"


@LAYOUT
def test_a_rank_that_does_not_join_a_collective_is_named(layout):
    first, second, third = run_workers(call_after_the_timeout, 3, (3,), environment(layout, 3))
    # The rank that times out first names it, and tells the others.
    assert any(text.startswith("CollectiveTimeoutError") for text in (first, third))
    for text in (first, third):
        assert "timed out in allreduce of float32 [3]" in text
        assert "it waited for rank 1" in text
    assert "gave up" in second


KINDS: dict[str, Callable[[torch.Tensor], object]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "all_gather": lambda x: dist.all_gather([torch.empty_like(x) for _ in range(4)], x),
    "reduce_scatter": lambda x: dist.reduce_scatter(x, [x.clone() for _ in range(4)]),
    "all_to_all": lambda x: dist.all_to_all([torch.empty_like(x) for _ in range(4)], [x.clone() for _ in range(4)]),
}


def call_all_but_one(rank: int, size: int, kind: str, count: int, missing: int) -> str:
    store = job_store(rank, size)
    dist.init_process_group("farprop", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=2))
    dist.barrier()
    if rank == missing:
        store.wait([f"gave up/{other}" for other in range(size) if other != missing])
        have_the_others_tensors(KINDS[kind], torch.ones(count))
    error = error_of(KINDS[kind], torch.ones(count))
    store.set(f"gave up/{rank}", "")
    store.wait([f"gave up/{other}" for other in range(size)])
    dist.destroy_process_group()
    store.set(f"left/{rank}", "")
    if rank == 0:
        store.wait([f"left/{other}" for other in range(size)])
    return str(error)


@pytest.mark.parametrize(
    ("kind", "count", "missing"), [(kind, 3, 2) for kind in KINDS] + [(kind, 100_000, 3) for kind in KINDS]
)
def test_only_the_missing_rank_is_named_if_ranks_of_several_hosts_wait(kind, count, missing):
    """Also those that wait in the shared memory of another host are not named."""
    texts = run_workers(call_all_but_one, 4, (4, kind, count, missing), environment("2+2", 4))
    for rank, text in enumerate(texts):
        assert rank == missing or f"it waited for rank {missing}." in text, texts


def collective_after_a_rank_left(rank: int, size: int) -> None:
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
def test_a_collective_after_a_rank_has_left_fails(layout):
    run_workers(collective_after_a_rank_left, 2, (2,), environment(layout, 2))


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
        # All of these were raised before anything was sent.
        dist.all_reduce(x)
        assert x.equal(torch.full((3,), float(size)))


def test_bad_arguments_break_nothing():
    run_workers(bad_arguments, 2, (2,))


def mismatched_all_to_all(rank: int, size: int) -> str:
    with default_group("farprop", rank, size):
        outputs = [torch.zeros(2), torch.zeros(3 if rank == 0 else 2)]
        with pytest.raises((CollectiveError, UsageError)) as caught:
            dist.all_to_all(outputs, [torch.ones(2), torch.ones(2)])
        return str(caught.value)


def test_all_to_all_with_mismatched_sizes_fails():
    first, second = run_workers(mismatched_all_to_all, 2, (2,))
    assert first == "Rank 1 sends 2 elements to rank 0, which expects 3."
    assert "failed on rank 0" in second
    assert first in second


def mismatched_hosts(rank: int, size: int, sent: list[list[int]], expected: list[list[int]]) -> str:
    with default_group("farprop", rank, size):
        outputs = [torch.zeros(count) for count in expected[rank]]
        with pytest.raises((CollectiveError, UsageError)) as caught:
            dist.all_to_all(outputs, [torch.ones(count) for count in sent[rank]])
            dist.barrier()  # some ranks get what they expect, and find out here
        return str(caught.value)


@pytest.mark.parametrize("scale", [1, 50_000])
def test_all_to_all_with_mismatched_sizes_of_several_hosts_fails(scale):
    """Rank 0 expects one more from rank 2, and one less from rank 3: the total of their host is right."""
    sent = [[scale * 4] * 4 for _ in range(4)]
    expected = [[scale * 4] * 4 for _ in range(4)]
    expected[0][2] += 1
    expected[0][3] -= 1
    texts = run_workers(mismatched_hosts, 4, (4, sent, expected), environment("2+2", 4))
    if scale == 1:
        right = "Rank 2 sends 4 elements to rank 0, which expects 5."
    else:
        right = f"Rank 2 sends {scale * 16} bytes where {scale * 16 + 4} are received."
    assert all(right in text for text in texts), texts


def test_all_to_all_with_a_mismatched_block_of_a_host_fails():
    sent = [[4] * 4 for _ in range(4)]
    expected = [[4] * 4 for _ in range(4)]
    expected[1][2] += 1
    texts = run_workers(mismatched_hosts, 4, (4, sent, expected), environment("2+2", 4))
    assert all("Rank 2 sends" in text and "are received" in text for text in texts), texts


def missing_rank(rank: int, size: int) -> None:
    store = job_store(rank, size)
    if rank == 0:
        with pytest.raises(RendezvousError, match="Rank 1 of 2 has not called init_process_group"):
            dist.init_process_group("farprop", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1))
        store.set("done", "")
    store.wait(["done"])


def test_a_rank_that_does_not_start_is_named():
    run_workers(missing_rank, 2, (2,), check=False)


def refused(rank: int, size: int, words: str) -> None:
    """No rank can join the group, and the error of each has these words."""
    store = job_store(rank, size)
    with pytest.raises(RendezvousError, match=words):
        dist.init_process_group("farprop", store=store, rank=rank, world_size=size)
    store.set(f"done/{rank}", "")
    if rank == 0:  # it has the store
        store.wait([f"done/{other}" for other in range(size)])


def test_ranks_with_different_secrets_are_refused():
    environments = [{"FARPROP_SECRET": secrets.token_hex(16)} for _ in range(2)]
    run_workers(refused, 2, (2, "different secrets"), environments, check=False)


def destroy_with_pending_work(rank: int, size: int) -> None:
    store = job_store(rank, size)
    dist.init_process_group("farprop", store=store, rank=rank, world_size=size)
    finished_barrier()
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        dist.destroy_process_group()
        assert "destroyed before it was done" in str(error_of(work.wait))
        store.set("destroyed", "")
        store.wait(["told"])
    else:
        store.wait(["destroyed"])
        have_the_others_tensors(dist.all_reduce, torch.ones(1))
        assert "Rank 0 gave up" in str(error_of(dist.all_reduce, torch.ones(1)))
        store.set("told", "")
        dist.destroy_process_group()


@LAYOUT
def test_destroying_a_group_with_pending_works_fails_them(layout):
    run_workers(destroy_with_pending_work, 2, (2,), environment(layout, 2))


def exit_without_destroying(rank: int, size: int) -> None:
    dist.init_process_group("farprop", store=job_store(rank, size), rank=rank, world_size=size)
    for _ in range(20):
        dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("layout", ["one", "tcp"])
def test_exiting_without_destroying_the_group(layout):
    run_workers(exit_without_destroying, 3, (3,), environment(layout, 3), check=False, full_exit=True)


def start_and_end_threads(rank: int, size: int) -> None:
    before = threading.active_count()
    with default_group("farprop", rank, size):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
        assert threading.active_count() > before


def test_no_thread_is_left_behind():
    run_workers(start_and_end_threads, 2, (2,))


def test_rank_that_goes_away_while_descriptors_are_passed() -> None:
    """It has not read what was sent to it, so the kernel says that it has reset the connection."""
    own, other = socket.socketpair()
    with own:
        own.send(b"x")
        other.close()
        with pytest.raises(RendezvousError, match="Rank 3 was lost"):
            bootstrap._receive_descriptor(own, 3, time.monotonic() + 10)
        with pytest.raises(RendezvousError, match="Rank 3 was lost"):
            bootstrap._send_descriptor(own, 3, own.fileno())
