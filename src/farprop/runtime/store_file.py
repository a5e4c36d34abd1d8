"""The file of a ``FileStore``. A disk that is full while workers join must not leave half a record in it.

Torch's store waits in C++ for the rest of a record, for ever, without a deadline and without a look at signals, and so
does every other process that reads the file. So room for records is reserved before one is written, and the file is
looked at before the store reads it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from typing import Any

import torch.distributed as dist

from farprop.errors import RendezvousError

_ROOM = 1 << 16  # bytes: the records of many workers that join at the same moment
_KEEP_SIZE = 1  # of fallocate: what is reserved is not part of the file yet
_FULL = (errno.ENOSPC, errno.EDQUOT)


class StoreFile:
    """See the module's text.

    Args:
        path: the file; it is made before it is written to.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._checked = 0, 0  # the file's inode, and bytes of it that are whole records

    @classmethod
    def of(cls, store: Any) -> StoreFile | None:
        """The file that a store is kept in, if any."""
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return cls(str(store.path)) if isinstance(store, dist.FileStore) else None  # type: ignore[attr-defined]

    def prepare(self, to_write: bool) -> None:
        """Check that a store can read the file, and have room to write to it.

        Raises:
            RendezvousError: the file can't be used. Nothing was written.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT if to_write else os.O_RDONLY, 0o644)
        except OSError as error:
            raise RendezvousError(f"The store's file can't be opened: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # torch's store writes under a lock
            self._check(descriptor)
            if to_write:
                self._reserve(descriptor)
        finally:
            os.close(descriptor)

    def _check(self, descriptor: int) -> None:
        inode, checked = self._checked  # other threads may check the same file: each sees a pair that belongs together
        state = os.fstat(descriptor)
        if inode != state.st_ino or checked > state.st_size:
            checked = 0  # it was removed, and is another one now
        data = os.pread(descriptor, state.st_size - checked, checked)
        at = 0
        while at < len(data):
            for _ in ("key", "value"):
                at += 4 + int.from_bytes(data[at : at + 4], "little")
            if at > len(data):
                raise RendezvousError(
                    f"The store's file {self._path} ends in the middle of a record: its disk was full, or somebody "
                    "else has written to it. Use another file, or tcp:// or env:// instead of file://."
                )
        self._checked = state.st_ino, state.st_size

    def _reserve(self, descriptor: int) -> None:
        if not _fallocate(descriptor, _KEEP_SIZE, os.fstat(descriptor).st_size, _ROOM):
            code = ctypes.get_errno()
            if code in _FULL:  # some file systems don't reserve room, and say so
                raise RendezvousError(f"There is no room for the store's file {self._path}: {os.strerror(code)}")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


def _fallocate(descriptor: int, mode: int, offset: int, length: int) -> bool:
    return bool(_libc.fallocate(descriptor, mode, offset, length) == 0)
