"""Shared memory between two workers of one host: segments that the sender writes and the receiver reads in place.

A segment belongs to one direction of one connection. Rules that hold here:

- It is *free* (the sender may write to it) or *lent* (the receiver uses it, the sender must not touch it).
- The receiver returns it when the last tensor on it is garbage-collected. When the connection closes, lent segments
  are dropped, never reused: the receiver may still read them.
- Free segments count against the pool's limit, for all connections together; beyond it the oldest are dropped. Of those
  that nobody needs, half are dropped every ``HALF_LIFE`` seconds, until few are left.
- The memory of a dropped segment is free at once, also if the receiver still has it mapped: it unmaps it when it reads
  the sender's next message.

The descriptors of segments are passed on a second socket beside the connection (``FdChannel``). The connection itself
could pass them, but then every read would have to ask for them, which makes a small call a fifth slower. The dialer
makes a pair of sockets and passes one end with the connection's first message.
"""

from __future__ import annotations

import array
import ctypes
import itertools
import mmap
import os
import socket
import struct
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy

from farprop.errors import ProtocolError
from farprop.locks import make_lock
from farprop.transport.sockets import SEND_FLAGS

if TYPE_CHECKING:
    from farprop.transport.shared_copies import SharedCopy

# Copying a smaller buffer through the socket is faster than lending a segment.
MIN_SHARED = 64 * 1024
_CHUNK = 64 * 1024
HALF_LIFE = 1.0  # seconds in which the pool drops half of the free segments that nobody needs
_FEW_BYTES = 16 << 20  # free segments of fewer bytes stay for ever: no timer runs for them
# With this many bytes of returned segments waiting for a message, ``on_returned`` is called.
_MUCH = 16 << 20
_P = TypeVar("_P", bound="Pooled", contravariant=True)


class Segment:
    """Mapped shared memory on the sender's side."""

    __slots__ = ("_array", "number", "size")

    def __init__(self, number: int, size: int, channel: FdChannel) -> None:
        """Make a segment and pass its descriptor to the receiver; raises ``OSError`` if that is not possible now."""
        self.number = number
        self.size = size
        descriptor, mapping = new_shared_memory(size)
        try:
            self._array = numpy.frombuffer(view_of(mapping.root(), size), numpy.uint8)
            if not channel.send(number, descriptor):
                raise OSError("the descriptor channel is full")
        finally:
            os.close(descriptor)

    def write(self, data: memoryview) -> None:
        # NumPy releases the interpreter's lock while it copies.
        self._array[: data.nbytes] = numpy.frombuffer(data, numpy.uint8)

    def release_memory(self) -> None:
        release_memory(self._array)


class Pooled(Protocol):
    """A free segment, or another piece of shared memory that nobody uses now."""

    number: int
    size: int


class PoolOwner(Protocol[_P]):
    """Whoever has put something into the pool."""

    def drop(self, segment: _P, /) -> None: ...


class SegmentPool:
    """The free segments of all connections of a process. Drops the oldest when they exceed the limit.

    Args:
        limit: the most bytes that free segments may have.
        call_later: has ``halve`` called after so many seconds, on a thread that may take its time.
    """

    def __init__(self, limit: int, call_later: Callable[[float], None]) -> None:
        self._limit = limit
        self._call_later = call_later
        self._lock = make_lock("segment_pool")
        self._free: OrderedDict[tuple[int, int], tuple[PoolOwner[Any], Pooled]] = OrderedDict()
        self._free_bytes = 0
        self._unneeded = 0  # the least number of free bytes since ``halve`` last ran
        self._is_halving = False  # ``halve`` will be called

    def add(self, sender: PoolOwner[_P], segment: _P) -> None:
        with self._lock:
            self._free[id(sender), segment.number] = sender, segment
            self._free_bytes += segment.size
            drop = self._take_oldest(self._free_bytes - self._limit)
            begin = not self._is_halving and self._free_bytes > _FEW_BYTES
            if begin:
                self._is_halving = True
                self._unneeded = self._free_bytes
        self._drop(drop)
        if begin:
            self._call_later(HALF_LIFE)

    def halve(self) -> bool:
        """Drop half of the segments that were free since this was last called; returns whether any was dropped."""
        with self._lock:
            most = max(0, self._free_bytes - _FEW_BYTES)
            drop = self._take_oldest(min(most, -(-self._unneeded // 2)))
            self._unneeded = self._free_bytes
            self._is_halving = goes_on = self._free_bytes > _FEW_BYTES
        self._drop(drop)
        if goes_on:
            self._call_later(HALF_LIFE)
        return bool(drop)

    def _take_oldest(self, size: int) -> list[tuple[PoolOwner[Any], Pooled]]:
        """Remove the oldest segments, until they have ``size`` bytes."""
        taken = []
        while size > 0 and self._free:
            _, (owner, oldest) = self._free.popitem(last=False)
            self._free_bytes -= oldest.size
            self._unneeded = min(self._unneeded, self._free_bytes)
            size -= oldest.size
            taken.append((owner, oldest))
        return taken

    def _drop(self, segments: list[tuple[PoolOwner[Any], Pooled]]) -> None:
        for owner, segment in segments:
            owner.drop(segment)

    def take(self, sender: PoolOwner[_P], segment: _P) -> bool:
        """Claim a free segment; False if it has been dropped meanwhile."""
        with self._lock:
            if self._free.pop((id(sender), segment.number), None) is None:
                return False
            self._free_bytes -= segment.size
            if self._free_bytes < self._unneeded:
                self._unneeded = self._free_bytes
            return True

    def forget(self, sender: PoolOwner[Any]) -> None:
        with self._lock:
            for key in [key for key in self._free if key[0] == id(sender)]:
                self._free_bytes -= self._free.pop(key)[1].size
            self._unneeded = min(self._unneeded, self._free_bytes)

    @property
    def free_bytes(self) -> int:
        return self._free_bytes

    def validate(self) -> None:
        with self._lock:
            assert self._free_bytes == sum(segment.size for _, segment in self._free.values())


class ShmSender:
    """The sender's side of one connection."""

    def __init__(self, pool: SegmentPool) -> None:
        self.fd_channel: FdChannel | None = None  # without it no segments are lent
        self._pool = pool
        self._lock = make_lock("shm_sender")
        self._numbers = itertools.count(1)
        self._free: list[Segment] = []
        self._lent: dict[int, Segment | SharedCopy] = {}
        self.dropped: deque[int] = deque()  # numbers of segments that the receiver has to unmap
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

    def lend_copy(self, copy: SharedCopy) -> int | None:
        """Lend memory that other workers have, too; returns its number here, or None if that is not possible now."""
        with self._lock:
            number = next(self._numbers)
        channel = self.fd_channel
        if channel is None or not channel.send(number, copy.descriptor):
            return None
        copy.hold()
        with self._lock:
            if not self._closed:
                self._lent[number] = copy
                return number
        copy.lose()  # the receiver may have the descriptor
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
            channel = self.fd_channel
            return None if channel is None else Segment(number, -(-size // _CHUNK) * _CHUNK, channel)
        except (OSError, OverflowError):
            return None

    def take_back(self, numbers: Iterable[int]) -> None:
        """The receiver has returned these segments."""
        for number in numbers:
            with self._lock:
                segment = self._lent.pop(number, None)
                if segment is None:
                    raise ProtocolError(f"the peer gave back segment {number}, which it does not have")
                if isinstance(segment, Segment):
                    self._free.append(segment)
            if isinstance(segment, Segment):
                self._pool.add(self, segment)
            else:
                segment.release()
        if self._closed:
            self._pool.forget(self)

    def drop(self, segment: Segment) -> None:
        with self._lock:
            if segment not in self._free:
                return
            self._free.remove(segment)
        segment.release_memory()
        self.dropped.append(segment.number)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._pool.forget(self)
        with self._lock:
            self._free.clear()
            lent, self._lent = self._lent, {}
        for segment in lent.values():
            if not isinstance(segment, Segment):
                segment.lose()

    @property
    def lent_bytes(self) -> int:
        with self._lock:
            return sum(segment.size for segment in self._lent.values())


class ShmReceiver:
    """The receiver's side of one connection."""

    def __init__(self, on_returned: Callable[[], None]) -> None:
        """``on_returned`` is called when many returned bytes wait for a message. It runs inside the garbage collector,
        so it may only set a flag and wake a thread.
        """
        self._on_returned = on_returned
        self._returned_bytes = 0
        self._memory: dict[int, SharedMapping] = {}
        self._leases: dict[int, weakref.ref[object]] = {}
        self.fd_channel: FdChannel | None = None
        # The garbage collector appends to it at any moment, on any thread, and does nothing else.
        self.returned: deque[int] = deque()

    def borrow(self, number: int, length: int) -> memoryview:
        """Return the memory of a segment. The segment is returned when nothing refers to this memory any more."""
        memory = self._memory.get(number)
        if memory is None:
            memory = self._map(number)
        if length > memory.size or number in self._leases:
            raise ProtocolError(f"segment {number} is lent already or shorter than {length} bytes")
        # The finaliser is on the exporting object, not on the view: NumPy makes its own view and drops ours.
        root = memory.root()
        leases = self._leases

        def give_back(_: object) -> None:
            leases.pop(number, None)
            self.give_back(number, length)

        leases[number] = weakref.ref(root, give_back)
        return view_of(root, length)

    def receive_descriptor(self, number: int) -> int:
        """The descriptor of memory that several workers have, which the caller owns."""
        if self.fd_channel is None:
            raise ProtocolError(f"segment {number} on a connection that passes none")
        return self.fd_channel.receive(number)

    def give_back(self, number: int, length: int) -> None:
        """Nothing refers to a segment any more. Called by the garbage collector."""
        self.returned.append(number)
        self._returned_bytes += length
        if self._returned_bytes >= _MUCH:
            self._returned_bytes = 0
            self._on_returned()

    def _map(self, number: int) -> SharedMapping:
        if self.fd_channel is None:
            raise ProtocolError(f"segment {number} on a connection that passes none")
        descriptor = self.fd_channel.receive(number)
        try:
            memory = self._memory[number] = SharedMapping(descriptor, os.fstat(descriptor).st_size)
        except OSError as error:
            raise ProtocolError(f"segment {number} can't be mapped: {error}") from error
        finally:
            os.close(descriptor)
        return memory

    def forget(self, numbers: Iterable[int]) -> None:
        """Unmap segments that the sender dropped. Tensors on them keep their mapping alive."""
        for number in numbers:
            self._memory.pop(number, None)

    def take_returned(self, most: int) -> list[int]:
        """Remove and return up to ``most`` numbers of segments to give back."""
        numbers: list[int] = []
        self._returned_bytes = 0
        while len(numbers) < most:
            try:
                numbers.append(self.returned.popleft())
            except IndexError:
                break
        return numbers

    def close(self) -> None:
        self._on_returned = _do_nothing  # segments that are released from now on are not returned
        self._memory.clear()


def _do_nothing() -> None: ...


# Mapping memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


class SharedMapping:
    """A mapping of ``size`` bytes of a file. Its descriptor may be closed afterwards.

    Python's ``mmap`` keeps a duplicate of the descriptor while the mapping lives: one per segment, on both sides. So
    this class calls the C library's ``mmap``, and unmaps when nothing refers to the mapping any more.
    """

    keep: object = None
    """Something that lives as long as the mapping."""

    def __init__(self, descriptor: int, size: int, private: bool = False) -> None:
        """With ``private``, what is written to the memory is seen by nobody else."""
        flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
        address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        if address == _FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.address = int(address)
        self.size = size
        self._type = ctypes.c_char * size
        weakref.finalize(self, _libc.munmap, self.address, size)

    def root(self) -> ctypes.Array[ctypes.c_char]:
        """A new buffer object on the memory. It keeps the mapping alive, and views of it keep it alive."""
        made = self._type.from_address(self.address)
        made.mapping = self  # type: ignore[attr-defined]
        return made


def new_shared_memory(size: int) -> tuple[int, SharedMapping]:
    """Make shared memory of ``size`` zero bytes.

    Returns:
        The descriptor, to be passed to other processes and then closed by the caller, and the mapping.

    Raises:
        OSError: there is no memory for it.
    """
    descriptor = os.memfd_create("farprop", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return descriptor, SharedMapping(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise


def release_memory(array: numpy.ndarray[Any, Any]) -> None:
    """Give shared memory back to the kernel. The mappings stay, on all sides; nobody may use them any more."""
    _libc.madvise(array.ctypes.data, array.nbytes, mmap.MADV_REMOVE)


def view_of(root: ctypes.Array[ctypes.c_char], length: int) -> memoryview:
    return memoryview(root).cast("B")[:length]


# Passing descriptors

_ONE_DESCRIPTOR = socket.CMSG_SPACE(4)
_NUMBER = struct.Struct("<Q")


def rights(descriptor: int) -> list[tuple[int, int, array.array[int]]]:
    """The ancillary data that passes a descriptor."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]


def receive_with_descriptor(sock: socket.socket, target: memoryview) -> tuple[int, int | None]:
    """Read into ``target``; returns the number of bytes, and the descriptor that was passed with them, if any."""
    count, ancillary, flags, _ = sock.recvmsg_into([target], _ONE_DESCRIPTOR, SEND_FLAGS)
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
    if len(received) > 1 or flags & socket.MSG_CTRUNC:
        for descriptor in received:
            os.close(descriptor)
        raise ProtocolError("descriptors were lost: does this process have too many open files?")
    if not received:
        return count, None
    os.set_inheritable(received[0], False)
    return count, received[0]


class FdChannel:
    """One end of a channel. Both ends send and receive."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._early: dict[int, int] = {}  # descriptors that were received before they were asked for

    @classmethod
    def pair(cls) -> tuple[FdChannel, socket.socket]:
        """Make a channel; returns our end, and the socket to pass to the peer."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return cls(ours), theirs

    @classmethod
    def from_descriptor(cls, descriptor: int) -> FdChannel:
        try:
            return cls(socket.socket(fileno=descriptor))
        except OSError as error:
            os.close(descriptor)
            raise ProtocolError(f"the peer passed something that is no socket: {error}") from error

    def send(self, number: int, descriptor: int) -> bool:
        """Pass a segment's descriptor. Call this before the message that needs it; False if the socket is full."""
        try:
            return self._sock.sendmsg([_NUMBER.pack(number)], rights(descriptor), SEND_FLAGS) == _NUMBER.size
        except OSError:
            return False

    def receive(self, number: int) -> int:
        """Return the descriptor of a segment, which the caller owns. The peer sent it before it sent the number."""
        while number not in self._early:
            message = bytearray(_NUMBER.size)
            try:
                count, descriptor = receive_with_descriptor(self._sock, memoryview(message))
            except OSError as error:
                raise ProtocolError(f"segment {number} was never passed: {error}") from error
            (arrived,) = _NUMBER.unpack(message)
            if descriptor is None or arrived in self._early:
                if descriptor is not None:
                    os.close(descriptor)
                raise ProtocolError(f"segment {number} was never passed ({count} bytes without a descriptor)")
            self._early[arrived] = descriptor
        return self._early.pop(number)

    def close(self) -> None:
        self._sock.close()
        while self._early:
            os.close(self._early.popitem()[1])
