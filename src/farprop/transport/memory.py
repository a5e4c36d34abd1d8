"""Mapped shared memory that outlives its descriptor and ends with its last user.

Python's ``mmap`` keeps a duplicate of the descriptor for as long as the mapping lives: one for each segment, on both
sides. So the C library's ``mmap`` is called here, and the mapping is undone when nothing refers to it any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """``size`` bytes of the file behind a descriptor, which may be closed afterwards."""

    def __init__(self, descriptor: int, size: int) -> None:
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address = int(address)
        self.size = size
        self._type = ctypes.c_char * size
        weakref.finalize(self, _libc.munmap, self.address, size)

    def root(self) -> ctypes.Array[ctypes.c_char]:
        """A new object on the memory, which keeps the mapping alive. Whatever is built on a view of it keeps it
        alive.
        """
        made = self._type.from_address(self.address)
        made.mapping = self  # type: ignore[attr-defined]
        return made


def view_of(root: ctypes.Array[ctypes.c_char], length: int) -> memoryview:
    return memoryview(root).cast("B")[:length]
