"""Shared memory that several workers of one host read at once: one copy of what they all get.

Rules that hold here:

- Who gets a copy maps it privately: a page that it writes to becomes its own, and nobody else sees the change. Each use
  is a mapping of its own.
- The maker writes to a copy before it lends it, and then not again until all who have it have returned it. A copy that
  was lent on a connection that is closed now is never used again: the receiver may still read it.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections import deque
from collections.abc import Callable

import numpy

from farprop.errors import ProtocolError
from farprop.locks import make_lock
from farprop.transport.shared_memory import SegmentPool, SharedMapping, new_shared_memory, release_memory, view_of

_CHUNK = 64 * 1024


class SharedCopy:
    """Memory of this process that it lends to several workers; ``SharedCopies`` makes it. ``nbytes`` of it are used."""

    __slots__ = ("__weakref__", "_array", "_home", "descriptor", "holders", "is_lost", "nbytes", "number", "size")

    def __init__(self, home: SharedCopies, number: int, size: int) -> None:
        self._home = home
        self.number = number
        self.size = size
        self.nbytes = 0
        self.holders = 0
        self.is_lost = False  # it will not be used again
        self.descriptor, mapping = new_shared_memory(size)
        weakref.finalize(self, os.close, self.descriptor)
        self._array = numpy.frombuffer(view_of(mapping.root(), size), numpy.uint8)

    @property
    def view(self) -> memoryview:
        return self._array.data[: self.nbytes]

    def write(self, at: int, data: memoryview) -> None:
        # NumPy releases the interpreter's lock while it copies.
        self._array[at : at + data.nbytes] = numpy.frombuffer(data, numpy.uint8)

    def private(self) -> memoryview:
        """The memory for one use in this process. It counts as lent until nothing refers to it any more."""
        mapping = SharedMapping(self.descriptor, self.size, private=True)
        self.hold()
        weakref.finalize(mapping, self._home.returned.append, self)
        return view_of(mapping.root(), self.nbytes)

    def hold(self) -> None:
        self._home.hold(self)

    def release(self) -> None:
        self._home.release(self)

    def lose(self) -> None:
        """Whoever has it will not return it."""
        self.is_lost = True

    def release_memory(self) -> None:
        release_memory(self._array)


class SharedCopies:
    """The copies of a process. Those that nobody has any more are used again; the pool drops them in the end."""

    def __init__(self, pool: SegmentPool) -> None:
        self.returned: deque[SharedCopy] = deque()  # by the garbage collector, which takes no lock
        self._pool = pool
        self._lock = make_lock("shared_copies")
        self._numbers = itertools.count(1)
        self._free: list[SharedCopy] = []

    def make(self, nbytes: int) -> SharedCopy | None:
        """Memory of so many bytes, which the caller holds; None if there is none."""
        while self.returned:
            self.returned.popleft().release()
        copy = self._take(nbytes)
        if copy is None:
            try:
                copy = SharedCopy(self, next(self._numbers), -(-nbytes // _CHUNK) * _CHUNK)
            except (OSError, OverflowError):
                return None
        copy.nbytes = nbytes
        copy.holders = 1
        return copy

    def _take(self, nbytes: int) -> SharedCopy | None:
        with self._lock:
            fitting = [copy for copy in self._free if nbytes <= copy.size <= 2 * nbytes + (1 << 20)]
            for copy in sorted(fitting, key=lambda copy: copy.size):
                if self._pool.take(self, copy):
                    self._free.remove(copy)
                    return copy
        return None

    def hold(self, copy: SharedCopy) -> None:
        with self._lock:
            copy.holders += 1

    def release(self, copy: SharedCopy) -> None:
        with self._lock:
            copy.holders -= 1
            is_free = not copy.holders and not copy.is_lost
            if is_free:
                self._free.append(copy)
        if is_free:
            self._pool.add(self, copy)

    def drop(self, copy: SharedCopy) -> None:
        """The pool has no room for it."""
        with self._lock:
            if copy not in self._free:
                return
            self._free.remove(copy)
        copy.release_memory()

    def close(self) -> None:
        self._pool.forget(self)
        with self._lock:
            self._free.clear()


class BorrowedCopy:
    """A copy that another worker has lent to this one. It is returned when nothing refers to it any more."""

    __slots__ = ("__weakref__", "_descriptor", "_size", "nbytes")

    def __init__(self, descriptor: int, nbytes: int, give_back: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self.nbytes = nbytes
        weakref.finalize(self, _end_loan, descriptor, give_back)
        self._size = os.fstat(descriptor).st_size
        if nbytes > self._size:
            raise ProtocolError(f"a shared copy is shorter than {nbytes} bytes")

    def private(self) -> memoryview:
        """The memory for one use: what is written to it is seen by nobody else."""
        try:
            mapping = SharedMapping(self._descriptor, self._size, private=True)
        except OSError as error:
            raise ProtocolError(f"a shared copy can't be mapped: {error}") from error
        mapping.keep = self
        return view_of(mapping.root(), self.nbytes)


def _end_loan(descriptor: int, give_back: Callable[[], None]) -> None:
    os.close(descriptor)
    give_back()
