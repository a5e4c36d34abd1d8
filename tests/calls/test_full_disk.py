"""A worker whose disk is full: it can't join, and says why. When there is room again, it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import farprop.rpc as rpc
from farprop.errors import RendezvousError, UsageError
from tests.support.disks import NotAllowedError, SmallDisk
from tests.support.workers import processes

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
