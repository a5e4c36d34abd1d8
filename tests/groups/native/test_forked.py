"""A child that a rank forks, as data loaders do, is not a rank of its group."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist

from farprop.errors import UsageError
from tests.groups.kinds import default_group
from tests.groups.native import endless
from tests.groups.native.layouts import environment
from tests.groups.native.test_deaths import check_lost, join_all
from tests.support.workers import processes, run_workers

LAYOUT = pytest.mark.parametrize("layout", ["one", "tcp"])


def fork_idle_child() -> int:
    pid = os.fork()
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(1)
    return pid


@LAYOUT
def test_a_forked_child_does_not_keep_a_dead_rank_alive(layout):
    with processes(2, environment(layout, 2), check=False) as job:
        join_all(job, 2)
        child = job.run(1, fork_idle_child)
        try:
            waiting = job.start(0, endless.once, "all_reduce")
            job.kill(1)
            check_lost(waiting.result(), {1})
        finally:
            os.kill(child, signal.SIGKILL)


def use_group_in_a_child() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with pytest.raises(UsageError) as caught:
                dist.all_reduce(torch.ones(1))
            dist.destroy_process_group()  # sends nothing to the other ranks
            os.write(writing, str(caught.value).encode())
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as text:
        assert "forked from rank 1, and is not a rank of its group" in text.read()
    os.waitpid(pid, 0)


def fork_and_go_on(rank: int, size: int) -> None:
    with default_group("farprop", rank, size):
        if rank == 1:
            use_group_in_a_child()
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.equal(torch.full((3,), float(size)))


@LAYOUT
def test_using_the_group_in_a_forked_child_raises(layout):
    run_workers(fork_and_go_on, 2, (2,), environment(layout, 2))
