"""A worker whose disk is full: it can't join, and says why. When there is room again, it can."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

import farprop.rpc as rpc
from farprop.errors import RendezvousError, UsageError
from farprop.runtime import rendezvous
from farprop.runtime.store_file import StoreFile
from tests.support.disks import NotAllowedError, SmallDisk
from tests.support.workers import WorkerDied, processes

pytestmark = pytest.mark.one_transport  # no call is made

_WITH_FILES = pytest.mark.parametrize("with_files", [False, True], ids=["no bytes", "no files"])


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(SmallDisk(str(tmp_path / "disk")))
        except NotAllowedError as error:
            pytest.skip(str(error))
        yield made


def _join(init_method: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    rpc.shutdown()


@_WITH_FILES
def test_no_room_for_the_secret(disk: SmallDisk, tmp_path: Path, with_files: bool) -> None:
    with processes(1, disk.environment) as job:
        disk.fill(with_files)
        with pytest.raises(UsageError, match=r"secret can't be kept in .*No space left.*FARPROP_SECRET"):
            job.run(0, _join, f"file://{tmp_path}/meet")
        disk.free()
        job.run(0, _join, f"file://{tmp_path}/meet-again")


@_WITH_FILES
@pytest.mark.parametrize("world_size", [1, None])
def test_no_room_for_the_store(disk: SmallDisk, tmp_path: Path, with_files: bool, world_size: int | None) -> None:
    with processes(1, {**disk.environment, "TMPDIR": str(tmp_path)}) as job:
        disk.fill(with_files)
        with pytest.raises(RendezvousError, match="No space left"):
            job.run(0, _join_by_file, disk.directory, world_size)
        disk.free()
        job.run(0, _join_by_file, f"{disk.directory}/another", world_size)


def _join_by_file(directory: str, world_size: int | None) -> None:
    Path(directory).mkdir(exist_ok=True)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{directory}/meet")
    rpc.init_rpc("worker0", rank=0, world_size=world_size, rpc_backend_options=options)
    rpc.shutdown()


def _join_twice(path: str) -> str:
    """Join by a file that ends in the middle of a record, as a disk that fills up would leave it."""
    store = dist.FileStore(path, 2)
    store.set("a", "some value")
    whole = Path(path).read_bytes()
    with open(path, "ab") as file:
        file.write(whole[:-3])
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}")
    with pytest.raises(RendezvousError, match="in the middle of a record"):
        rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    with pytest.raises(RendezvousError, match="in the middle of a record"):
        rendezvous.job_of(dist.PrefixStore("farprop", store))  # as a process group does
    os._exit(0)  # the store itself would wait for the rest when it is closed


def test_half_a_record_in_the_file_of_the_store_is_an_error(tmp_path: Path) -> None:
    with processes(1, timeout=20) as job:
        call = job.start(0, _join_twice, f"{tmp_path}/meet")
        assert job.wait(0) == 0
        assert isinstance(call.exception(), WorkerDied)


def _count_records(path: str) -> int:
    """Write until there is no room left; returns how many records were written."""
    store = rendezvous.CheckedStore(dist.FileStore(path, 1))
    for number in itertools.count():
        try:
            store.set(f"key {number}", "x" * 1000)
        except RendezvousError:
            StoreFile(path).prepare(to_write=False)  # before the store removes its file
            return number


def test_a_disk_that_fills_up_leaves_whole_records(disk: SmallDisk) -> None:
    with processes(1, disk.environment) as job:
        written = job.run(0, _count_records, f"{disk.directory}/meet")
        assert 100 < written < 256


def test_threads_may_share_a_store_file(tmp_path: Path) -> None:
    store = rendezvous.CheckedStore(dist.FileStore(f"{tmp_path}/meet", 1))
    problems = []

    def use(thread: int) -> None:
        try:
            for number in range(200):
                store.set(f"{thread} {number}", "x" * number)
                assert store.has([f"{thread} {number}"])
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
