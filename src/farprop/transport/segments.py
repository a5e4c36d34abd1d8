"""Shared memory between two workers of one host: segments that the sender writes and the receiver reads in place.

A segment belongs to one direction of one connection. Rules that hold here:

- It is *free* (the sender may write to it) or *lent* (the receiver has it, the sender may not touch it).
- It comes back when the last tensor on it is collected at the receiver. When the connection closes, lent segments are
  dropped, never reused: the receiver may still read them.
- Free segments count against the pool's limit, for all connections together; beyond it the oldest are dropped.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

import numpy

from farprop.errors import ProtocolError
from farprop.transport.memory import Mapping, view_of
from farprop.transport.passage import Passage

# Smaller buffers are copied through the socket faster than they are lent and given back.
MIN_SHARED = 64 * 1024
_CHUNK = 64 * 1024
# So much may be returned before somebody is told to send the give-backs.
_MUCH = 16 << 20


class Segment:
    """A mapped piece of shared memory on the sender's side."""

    __slots__ = ("_array", "number", "size")

    def __init__(self, number: int, size: int, passage: Passage) -> None:
        """Make it and pass it to the receiver; ``OSError`` if that can't be done now."""
        self.number = number
        self.size = size
        descriptor = os.memfd_create("farprop", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            self._array = numpy.frombuffer(view_of(Mapping(descriptor, size).root(), size), numpy.uint8)
            if not passage.send(number, descriptor):
                raise OSError("no room for another segment on its way")
        finally:
            os.close(descriptor)

    def write(self, data: memoryview) -> None:
        # NumPy, because it lets other threads run while it copies.
        self._array[: data.nbytes] = numpy.frombuffer(data, numpy.uint8)


class SegmentPool:
    """Counts the free segments of all connections of a process and decides which to drop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._free: OrderedDict[tuple[int, int], tuple[Lending, Segment]] = OrderedDict()
        self._free_bytes = 0

    def add(self, lending: Lending, segment: Segment) -> None:
        with self._lock:
            self._free[id(lending), segment.number] = lending, segment
            self._free_bytes += segment.size
            drop = []
            while self._free_bytes > self._limit and self._free:
                _, (owner, oldest) = self._free.popitem(last=False)
                self._free_bytes -= oldest.size
                drop.append((owner, oldest))
        for owner, oldest in drop:
            owner.drop(oldest)

    def take(self, lending: Lending, segment: Segment) -> bool:
        """Claim a free segment; False if it was dropped a moment ago."""
        with self._lock:
            if self._free.pop((id(lending), segment.number), None) is None:
                return False
            self._free_bytes -= segment.size
            return True

    def forget(self, lending: Lending) -> None:
        with self._lock:
            for key in [key for key in self._free if key[0] == id(lending)]:
                self._free_bytes -= self._free.pop(key)[1].size

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def validate(self) -> None:
        with self._lock:
            assert self._free_bytes == sum(segment.size for _, segment in self._free.values())


class Lending:
    """The sender's side of one connection."""

    def __init__(self, pool: SegmentPool) -> None:
        self.passage: Passage | None = None  # segments can be lent once there is one
        self._pool = pool
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._free: list[Segment] = []
        self._lent: dict[int, Segment] = {}
        self.dropped: deque[int] = deque()  # numbers that the receiver has to be told to unmap
        self._closed = False

    def lend(self, data: memoryview) -> Segment | None:
        """Copy ``data`` into a segment for the receiver; None if there is no memory for it."""
        segment = self._take(data.nbytes)
        if segment is None:
            return None
        segment.write(data)
        with self._lock:
            if not self._closed:
                self._lent[segment.number] = segment
                return segment
        return None

    def _take(self, size: int) -> Segment | None:
        with self._lock:
            fitting = [s for s in self._free if size <= s.size <= 2 * size + (1 << 20)]
            if len(fitting) > 1:
                fitting.sort(key=lambda s: s.size)
            for segment in fitting:
                if self._pool.take(self, segment):
                    self._free.remove(segment)
                    return segment
            number = next(self._numbers)
        try:
            return Segment(number, -(-size // _CHUNK) * _CHUNK, self.passage) if self.passage is not None else None
        except (OSError, OverflowError):
            return None

    def give_back(self, numbers: Iterable[int]) -> None:
        """The receiver is done with these."""
        for number in numbers:
            with self._lock:
                segment = self._lent.pop(number, None)
                if segment is None:
                    raise ProtocolError(f"the peer gave back segment {number}, which it does not have")
                self._free.append(segment)
            self._pool.add(self, segment)
        if self._closed:
            self._pool.forget(self)

    def drop(self, segment: Segment) -> None:
        with self._lock:
            if segment in self._free:
                self._free.remove(segment)
                self.dropped.append(segment.number)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._pool.forget(self)
        with self._lock:
            self._free.clear()
            self._lent.clear()

    @property
    def lent_bytes(self) -> int:
        with self._lock:
            return sum(segment.size for segment in self._lent.values())


class Borrowing:
    """The receiver's side of one connection."""

    def __init__(self, on_returned: Callable[[], None]) -> None:
        """``on_returned`` is called when much was returned that found no frame to ride on; it may only take note."""
        self._on_returned = on_returned
        self._returned_bytes = 0
        self._memory: dict[int, Mapping] = {}
        self._leases: dict[int, weakref.ref[object]] = {}
        self.passage: Passage | None = None
        # Filled by the garbage collector at any moment and in any thread, so nothing but append happens there.
        self.returned: deque[int] = deque()

    def borrow(self, number: int, length: int) -> memoryview:
        """The memory of a segment. It is given back when nothing refers to the result any more."""
        memory = self._memory.get(number)
        if memory is None:
            memory = self._map(number)
        if length > memory.size or number in self._leases:
            raise ProtocolError(f"segment {number} is lent already or shorter than {length} bytes")
        # Not the view but what it stands on: others (NumPy) make views of their own from ours and drop ours.
        root = memory.root()
        leases, returned = self._leases, self.returned

        def give_back(_: object) -> None:
            leases.pop(number, None)
            returned.append(number)
            self._returned_bytes += length
            if self._returned_bytes >= _MUCH:
                self._returned_bytes = 0
                self._on_returned()

        leases[number] = weakref.ref(root, give_back)
        return view_of(root, length)

    def _map(self, number: int) -> Mapping:
        if self.passage is None:
            raise ProtocolError(f"segment {number} on a connection that passes none")
        descriptor = self.passage.receive(number)
        try:
            memory = self._memory[number] = Mapping(descriptor, os.fstat(descriptor).st_size)
        except OSError as error:
            raise ProtocolError(f"segment {number} can't be mapped: {error}") from error
        finally:
            os.close(descriptor)
        return memory

    def forget(self, numbers: Iterable[int]) -> None:
        """The sender dropped these; tensors on them keep their mapping alive, others unmap now."""
        for number in numbers:
            self._memory.pop(number, None)

    def take_returned(self, most: int) -> list[int]:
        """The numbers to give back now."""
        numbers: list[int] = []
        self._returned_bytes = 0
        while len(numbers) < most:
            try:
                numbers.append(self.returned.popleft())
            except IndexError:
                break
        return numbers

    def close(self) -> None:
        self._on_returned = _do_nothing  # what is let go from now on is nobody's business any more
        self._memory.clear()


def _do_nothing() -> None: ...
