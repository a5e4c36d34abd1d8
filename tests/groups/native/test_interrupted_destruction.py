"""Ctrl-C while a group is destroyed: the second call ends what the first one began."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from farprop.distributed.native.mesh import Mesh
from tests.groups.store_group import job_store
from tests.support.workers import run_workers


def destroy_twice(rank: int, size: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    dist.init_process_group("farprop", store=job_store(rank, size), rank=rank, world_size=size)
    dist.barrier()
    goodbye = Mesh.say_goodbye

    def interrupted(mesh: Mesh) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        goodbye(mesh)

    Mesh.say_goodbye = interrupted  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            dist.destroy_process_group()
    finally:
        Mesh.say_goodbye = goodbye  # type: ignore[method-assign]
    dist.destroy_process_group()


def test_interrupted_destruction_leaves_nothing() -> None:
    run_workers(destroy_twice, 2, (2,))
