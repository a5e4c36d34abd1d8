"""The parcels that this worker gets: keeps them for the requests that need them, and sends them on to others.

``protocol/parcels.py`` decides; here is the memory. See "One call to many workers" in docs/design.md.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy

from farprop.errors import FarpropError, ProtocolError
from farprop.locks import make_lock
from farprop.protocol.parcels import Arrivals, Chunks, ParcelId, Relay, Route, Stop
from farprop.runtime.async_results import Deferred
from farprop.runtime.autograd.messages import CallbackCall
from farprop.runtime.chunk_sender import CHUNK_BYTES, STALL_SECONDS, ChunkSender, chunks_of, message_of
from farprop.runtime.services import WorkerServices
from farprop.runtime.timers import TimerHandle
from farprop.transport.connection import Connection
from farprop.transport.shared_copies import SharedCopies, SharedCopy
from farprop.wire.message import ANSWER, IN_REQUEST, Message, Method, ParcelPart

_log = logging.getLogger(__name__)

_UNCLAIMED_SECONDS = 300.0  # a parcel whose requests don't come is dropped: its caller died before it came
_REMEMBERED = 1000


class Memory(Protocol):
    """The bytes of a parcel that is here."""

    nbytes: int

    def private(self) -> memoryview:
        """The bytes for one request, which may write to them."""


class OwnMemory:
    """Bytes in memory of this worker's own. The first request gets them, others get copies."""

    def __init__(self, view: memoryview, uses: int) -> None:
        self.nbytes = view.nbytes
        self._view = view
        self._is_needed_again = uses > 1

    def private(self) -> memoryview:
        return memoryview(bytearray(self._view)) if self._is_needed_again else self._view


class HeldRequest:
    """A request that waits for its parcel."""

    __slots__ = ("connection", "counted_from", "message", "timer")

    def __init__(self, connection: Connection, message: Message, counted_from: float) -> None:
        self.connection = connection
        self.message = message
        self.counted_from = counted_from
        self.timer: TimerHandle | None = None


class Source(NamedTuple):
    """Who sends a parcel to this worker. Each sends all of its chunks."""

    parcel: ParcelId
    rank: int


class _Incoming:
    """A parcel that comes in chunks, from one source."""

    def __init__(self, size: int, memory: SharedCopy | memoryview) -> None:
        self.size = size
        self.memory = memory
        self.chunks = Chunks(chunks_of(size))
        self.stored: list[int] = []
        self.relay: Relay | None = None
        self.uses = 0
        self.next: ChunkSender | None = None
        self.is_complete = False
        self.is_shared = False  # or about to be, by a thread that has said so
        self.on_reported: Callable[[], None] | None = None

    def write(self, at: int, data: memoryview) -> None:
        if isinstance(self.memory, SharedCopy):
            self.memory.write(at, data)
        else:
            numpy.frombuffer(self.memory, numpy.uint8)[at : at + data.nbytes] = numpy.frombuffer(data, numpy.uint8)

    def read(self, index: int) -> list[memoryview]:
        memory = self.memory.view if isinstance(self.memory, SharedCopy) else self.memory
        return [memory[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]]


class Parcels:
    """Methods may be called from any thread; those that begin with ``on_`` are called by other workers.

    Args:
        services: the worker's.
        copies: its shared memory.
        most_bytes: the largest parcel that it takes.

    The agent sets ``accept``, which takes a request that has waited for its parcel.
    """

    accept: Callable[[Connection, Message, float], None]

    def __init__(self, services: WorkerServices, copies: SharedCopies, most_bytes: int) -> None:
        self._services = services
        self._copies = copies
        self._most_bytes = most_bytes
        self._lock = make_lock("parcels")
        self._arrivals: Arrivals[HeldRequest] = Arrivals()
        self._here: dict[ParcelId, Memory] = {}
        self._timers: dict[ParcelId, TimerHandle] = {}
        self._incoming: dict[Source, _Incoming] = {}
        self._ended: OrderedDict[Source, None] = OrderedDict()

    def methods(self) -> dict[Method, Callable[..., Any]]:
        return {
            Method.PARCEL: self.on_parcel,
            Method.PARCEL_CHUNK: self.on_chunk,
            Method.PARCEL_SHARE: self.on_share,
            Method.PARCEL_DROP: self.on_drop,
        }

    # Requests

    def hold(self, connection: Connection, message: Message, counted_from: float) -> bool:
        """Give a request its parcel, or hold it until the parcel is there.

        Returns:
            Whether it is held. Then it is accepted later, unless its time is over or its caller is gone.

        Raises:
            ProtocolError: the request makes no sense.
        """
        numbers = {part.number for part in message.buffers if type(part) is ParcelPart}
        if not numbers:
            return False
        if len(numbers) > 1 or self._services.dialect.restricted:
            raise ProtocolError("a request needs several parcels, or one in a restricted job")
        if IN_REQUEST in numbers:
            whole = message.buffers.pop()
            if type(whole) is ParcelPart:
                raise ProtocolError("a request does not have the parcel that it needs")
            _fill(message, OwnMemory(whole, 1) if type(whole) is memoryview else whole)
            return False
        parcel = ParcelId(connection.rank, numbers.pop())
        request = HeldRequest(connection, message, counted_from)
        with self._lock:
            memory = self._here.get(parcel)
            decision = self._arrivals.request(parcel, request)
        if memory is not None:
            self._forget_if_over(parcel)
        if decision is False:
            if message.seconds is not None:
                request.timer = self._services.call_at(
                    counted_from + message.seconds, partial(self._services.submit, self._expire, parcel, request)
                )
            return True
        if decision is None or memory is None:
            _refuse(message)
        else:
            _fill(message, memory)
        return False

    def _forget_if_over(self, parcel: ParcelId) -> None:
        with self._lock:
            if self._arrivals.is_here(parcel):
                return
            self._here.pop(parcel, None)
            timer = self._timers.pop(parcel, None)
        if timer is not None:
            timer.cancel()

    def _expire(self, parcel: ParcelId, request: HeldRequest) -> None:
        """The time of a request is over."""
        with self._lock:
            withdrawn = self._arrivals.withdraw(parcel, request)
        if withdrawn:
            self._give_up([request])

    def cancel(self, connection: Connection, call_id: int) -> None:
        """The caller has cancelled a call. If it waits for its parcel, it is refused now: the parcel may never come."""
        with self._lock:
            for request in self._arrivals.held():
                if request.connection is connection and request.message.call_id == call_id:
                    break
            else:
                return
            number = next(part.number for part in request.message.buffers if type(part) is ParcelPart)
            self._arrivals.withdraw(ParcelId(connection.rank, number), request)
        self._give_up([request])

    def _give_up(self, requests: Sequence[HeldRequest]) -> None:
        for request in requests:
            if request.timer is not None:
                request.timer.cancel()
            _refuse(request.message)
            self.accept(request.connection, request.message, 0.0)

    @property
    def holds_requests(self) -> bool:
        """Whether requests wait for parcels."""
        return self._arrivals.holds

    def held(self) -> list[tuple[Connection, Message, float]]:
        """The requests that wait for parcels, for inspection."""
        with self._lock:
            return [(held.connection, held.message, held.counted_from) for held in self._arrivals.held()]

    # Parcels that are complete

    def arrive(self, parcel: ParcelId, uses: int, memory: Memory) -> None:
        """A parcel is here: accept the requests that wait for it."""
        with self._lock:
            requests = self._arrivals.arrived(parcel, uses)
            stays = requests is not None and self._arrivals.is_here(parcel)
            if stays:
                self._here[parcel] = memory
        if stays:
            when = time.monotonic() + _UNCLAIMED_SECONDS
            self._timers[parcel] = self._services.call_at(when, partial(self._services.submit, self.drop, parcel))
            self._forget_if_over(parcel)  # its requests may have come meanwhile
        for request in requests or ():
            if request.timer is not None:
                request.timer.cancel()
            try:
                _fill(request.message, memory)
            except ProtocolError as error:
                _log.error("%s: %s sent a call that makes no sense: %s", self._services.label, parcel.caller, error)
            self._services.submit(self.accept, request.connection, request.message, request.counted_from)

    def on_share(self, _: int, caller: int, number: int, uses: int, memory: Any) -> None:
        """A worker of this host has the parcel, and shares its memory."""
        if isinstance(memory, memoryview):
            memory = OwnMemory(memory, uses)
        self.arrive(ParcelId(caller, number), uses, memory)

    def share(
        self,
        parcel: ParcelId,
        stop: Stop,
        memory: SharedCopy | memoryview,
        on_end: Callable[[Exception | None], None] = lambda error: None,
    ) -> None:
        """Give a parcel to another worker of this host. ``on_end`` is called when it has it, or with the error."""

        def finish(answer: Message | None, error: Exception | None) -> None:
            if answer is not None and answer.kind != ANSWER:
                error = self._services.dialect.decode_failure(answer.payload)
            if error is not None:
                _log.info("%s can't share a parcel with rank %d: %s", self._services.label, stop.rank, error)
            on_end(error)

        message = message_of((*parcel, stop.uses), (memory,))
        try:
            call = CallbackCall(None, finish)
            self._services.send_method(stop.rank, Method.PARCEL_SHARE, message, call, system=True)
        except FarpropError as error:
            finish(None, error)

    # Parcels that come in chunks

    def on_parcel(self, source: int, caller: int, number: int, size: int, route: Route) -> Any:
        """A parcel is about to come, and this worker has to bring it to others. Answers who has not got it."""
        route = tuple(tuple(Stop(*stop) for stop in host) for host in route)
        key = Source(ParcelId(caller, number), source)
        if source == caller:
            # It does not wait for others who were to bring the parcel, nor need those behind.
            self._stop([other for other in list(self._incoming) if other.parcel == key.parcel and other != key])
        relay = Relay(route)
        incoming = self._incoming_of(key, size, bool(relay.near))
        if incoming is None:
            return [stop.rank for host in route for stop in host]
        following: ChunkSender | None = None
        if relay.behind:
            following = ChunkSender(
                self._services,
                key.parcel,
                size,
                relay.behind,
                incoming.read,
                partial(self._on_behind, key, incoming),
                lambda error: self._on_behind(key, incoming, None),
                lambda: self._on_behind(key, incoming, None),
            )
        with self._lock:
            incoming.relay, incoming.uses, incoming.next = relay, route[0][0].uses, following
            if following is not None:
                following.offer(incoming.stored)
        if following is not None:
            self._services.submit(following.start)
        if self._services.is_caller_gone():
            # Nobody else will end it: this may run after ``on_lost``.
            self._stop([key])

        def subscribe(done: Callable[..., None]) -> None:
            with self._lock:
                incoming.on_reported = done
                is_over = self._incoming.get(key) is not incoming
            if is_over:
                done()

        self._share_if_complete(key, incoming)
        return Deferred(subscribe, lambda: relay.all_ranks if relay.report is None else relay.report)

    def _incoming_of(self, key: Source, size: int, shares: bool) -> _Incoming | None:
        """The parcel that comes from a source; None if it has ended."""
        if not 0 < size <= self._most_bytes:
            raise ProtocolError(f"a parcel of {size} bytes is empty or larger than FARPROP_MAX_MESSAGE_BYTES")
        with self._lock:
            if key in self._ended:
                return None
            incoming = self._incoming.get(key)
            if incoming is None:
                memory = self._copies.make(size) if shares else None
                incoming = _Incoming(size, memory or numpy.empty(size, numpy.uint8).data)
                self._incoming[key] = incoming
            return incoming

    def on_chunk(
        self, source: int, caller: int, number: int, size: int, shares: bool, index: int, *parts: memoryview
    ) -> None:
        """A chunk of a parcel has come."""
        key = Source(ParcelId(caller, number), source)
        incoming = self._incoming_of(key, size, shares)
        length = min(CHUNK_BYTES, size - index * CHUNK_BYTES)
        if incoming is None or incoming.size != size or sum([part.nbytes for part in parts]) != length:
            return
        with self._lock:
            is_new = incoming.chunks.claim(index)
        if not is_new:
            return
        at = index * CHUNK_BYTES
        for part in parts:
            incoming.write(at, part)
            at += part.nbytes
        with self._lock:
            incoming.stored.append(index)
            incoming.is_complete = incoming.chunks.on_stored()
            following = incoming.next
            if following is not None:
                following.offer([index])
        if following is not None:
            following.go_on()
        self._share_if_complete(key, incoming)

    def _share_if_complete(self, key: Source, incoming: _Incoming) -> None:
        with self._lock:
            relay = incoming.relay
            if relay is None or not incoming.is_complete or incoming.is_shared:
                return
            incoming.is_shared = True
        # Not here: who is shared with may have to be dialled first.
        self._services.submit(self._share, key, incoming, relay)

    def _share(self, key: Source, incoming: _Incoming, relay: Relay) -> None:
        memory = incoming.memory
        for stop in relay.near:
            self.share(key.parcel, stop, memory, partial(self._on_near, key, incoming, relay, stop.rank))
        # The next relay may not have all of it yet: what a function writes must not go there.
        own = memory if isinstance(memory, SharedCopy) else OwnMemory(memory, incoming.uses + len(relay.behind))
        self.arrive(key.parcel, incoming.uses, own)
        with self._lock:
            relay.on_complete()
        if relay.near:
            overdue = partial(self._services.submit, self._on_overdue, key, incoming, relay)
            self._services.call_at(time.monotonic() + STALL_SECONDS, overdue)
        self._report(key, incoming, relay)

    def _on_near(self, key: Source, incoming: _Incoming, relay: Relay, rank: int, error: Exception | None) -> None:
        with self._lock:
            if error is None:
                relay.on_shared(rank)
            else:
                relay.on_share_failed(rank)
        self._report(key, incoming, relay)

    def _on_overdue(self, key: Source, incoming: _Incoming, relay: Relay) -> None:
        with self._lock:
            relay.on_shares_overdue()
        self._report(key, incoming, relay)

    def _on_behind(self, key: Source, incoming: _Incoming, missing: Sequence[int] | None) -> None:
        """The next relay has reported, or does nothing any more."""
        relay, following = incoming.relay, incoming.next
        assert relay is not None
        assert following is not None
        if missing is None:
            following.stop()
            if isinstance(incoming.memory, SharedCopy):
                incoming.memory.lose()  # some of its bytes may still be on their way
        with self._lock:
            if missing is None:
                relay.on_behind_lost()
            else:
                relay.on_behind_done(missing)
        self._report(key, incoming, relay)

    def _report(self, key: Source, incoming: _Incoming, relay: Relay) -> None:
        with self._lock:
            if relay.report is None or not self._end(key):
                return
            on_reported = incoming.on_reported
        if isinstance(incoming.memory, SharedCopy):
            incoming.memory.release()
        if on_reported is not None:
            on_reported()

    # The end of parcels

    def _end(self, key: Source) -> bool:
        """Forget what came from a source, under the lock; returns whether it was there."""
        self._ended[key] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        return self._incoming.pop(key, None) is not None

    def drop(self, parcel: ParcelId) -> None:
        """A parcel is not needed any more."""
        with self._lock:
            requests = self._arrivals.drop(parcel)
        self._forget_if_over(parcel)
        self._give_up(requests)

    def on_drop(self, source: int, caller: int, number: int) -> None:
        """The rest of a parcel does not come from this source; if that is its caller, from nobody."""
        parcel = ParcelId(caller, number)
        self._stop([Source(parcel, source)])
        if source == caller:
            self.drop(parcel)
            self._stop([key for key in list(self._incoming) if key.parcel == parcel])

    def on_lost(self, rank: int) -> None:
        """The connection of a worker is lost: nothing more comes on it."""
        with self._lock:
            parcels = self._arrivals.of_caller(rank)
        for parcel in parcels:
            self.drop(parcel)
        self._stop([key for key in list(self._incoming) if rank in (key.rank, key.parcel.caller)])

    def _stop(self, keys: Sequence[Source]) -> None:
        """Nothing more comes from these sources."""
        for key in keys:
            with self._lock:
                incoming = self._incoming.get(key)
                if incoming is not None and incoming.is_shared:
                    continue  # it is complete, and those behind get it
                self._end(key)
                on_reported = None if incoming is None else incoming.on_reported
            if incoming is None:
                continue
            if incoming.next is not None:
                incoming.next.stop()
            if isinstance(incoming.memory, SharedCopy):
                incoming.memory.lose()  # some of its bytes may still be on their way
                incoming.memory.release()
            if on_reported is not None:
                on_reported()

    @property
    def is_empty(self) -> bool:
        """Whether it has nothing to do. For tests."""
        return not self._incoming and self._arrivals.is_empty


def _fill(message: Message, memory: Memory) -> None:
    """Replace the parts of a parcel in a request by their bytes."""
    whole = memory.private()
    buffers: list[Any] = []
    for part in message.buffers:
        if type(part) is not ParcelPart:
            buffers.append(part)
            continue
        if part.offset + part.nbytes > whole.nbytes:
            _refuse(message)
            raise ProtocolError("a request needs bytes that its parcel does not have")
        buffers.append(whole[part.offset : part.offset + part.nbytes])
    if not message.payload:
        message.payload = buffers.pop()  # it was so long that it travelled with the parcel
    message.buffers = buffers


def _refuse(message: Message) -> None:
    """The arguments of a request do not come: it is answered as one that came too late."""
    message.buffers = []
    message.seconds = 1e-9
