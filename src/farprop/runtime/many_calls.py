"""Calls of one function on many workers. What they have in common is encoded once, and travels as a parcel.

Each worker gets its own request, straight from here, so deadlines, errors, references and autograd contexts are those
of any call. Buffers that several workers get are not in the requests: they name a part of the parcel. Requests to
workers of this host bring the parcel, as one copy in shared memory; those of other hosts get it from a relay on their
host. See "One call to many workers" in docs/design.md.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy
import torch

from farprop.errors import ConnectionLostError, FarpropError, InjectedFaultError, OverloadedError, UsageError
from farprop.ids import WorkerInfo
from farprop.locks import make_lock
from farprop.protocol.parcels import GiveUp, ParcelId, Route, Send, Spread, Stop, hosts_of
from farprop.protocol.roster import Entry
from farprop.runtime import checkpoint_regions
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.call_records import RPC_ASYNC, CallRecord
from farprop.runtime.calls import Calls, FutureResponse
from farprop.runtime.checkpoint_regions import region_here
from farprop.runtime.chunk_sender import CHUNK_BYTES, ChunkSender, chunks_of, drop
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.futures import Future
from farprop.runtime.membership import Membership
from farprop.runtime.peers import Peers
from farprop.runtime.recorder import recorder
from farprop.runtime.services import WorkerServices
from farprop.transport.shared_copies import SharedCopies, SharedCopy
from farprop.wire.message import IN_REQUEST, PARCEL_ALIGNMENT, PARCEL_NUMBERS, Message, ParcelPart
from farprop.wire.tensors import DeviceMapRequired

_log = logging.getLogger(__name__)

_LEAST_BYTES = 256 * 1024  # of a parcel: fewer bytes are sent to each worker
_LONG_PAYLOAD = 64 * 1024
_PADDING = memoryview(bytes(PARCEL_ALIGNMENT))

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Encoded(NamedTuple):
    """A call before it is known who gets it."""

    message: Message
    graph: list[torch.Tensor] | None


class _Layout:
    """The bytes of a parcel: memory of the program's tensors, one piece after the other, with padding between them."""

    def __init__(self) -> None:
        self.size = 0
        self._starts: list[int] = []
        self._pieces: list[memoryview] = []

    def add(self, piece: memoryview) -> int:
        """Append a piece; returns its offset."""
        gap = -self.size % PARCEL_ALIGNMENT
        if gap:
            self._append(_PADDING[:gap])
        offset = self.size
        self._append(piece)
        return offset

    def _append(self, piece: memoryview) -> None:
        self._starts.append(self.size)
        self._pieces.append(piece)
        self.size += piece.nbytes

    def write_to(self, write: Callable[[int, memoryview], None]) -> None:
        for start, piece in zip(self._starts, self._pieces, strict=True):
            write(start, piece)

    def chunk(self, index: int) -> list[memoryview]:
        begin, end = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, self.size)
        place = bisect.bisect_right(self._starts, begin) - 1
        parts: list[memoryview] = []
        while begin < end:
            start, piece = self._starts[place], self._pieces[place]
            part = piece[begin - start : end - start]
            parts.append(part)
            begin += part.nbytes
            place += 1
        return parts


class _Parcel:
    """What several of the calls have in common."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.layout = _Layout()

    def part(self, piece: memoryview) -> ParcelPart:
        return ParcelPart(self.number, self.layout.add(piece), piece.nbytes)


class _Item(NamedTuple):
    """One call."""

    entry: Entry
    encoded: _Encoded
    args: tuple[Any, ...]
    future: Future


class _Outgoing:
    """A parcel on its way to other hosts."""

    def __init__(
        self,
        services: WorkerServices,
        parcel: ParcelId,
        layout: _Layout,
        route: Route,
        calls: dict[int, list[tuple[Future, FutureResponse]]],
        keep: object,
    ) -> None:
        self._services = services
        self._parcel = parcel
        self._layout = layout
        self._machine = Spread(route)
        self._calls = calls
        self._keep = keep  # the memory of the parcel
        self._lock = make_lock("outgoing_parcel")

    def start(self) -> None:
        with self._lock:
            actions = self._machine.start()
        self._perform(actions)

    def _read(self, index: int) -> list[memoryview] | None:
        if all(self._has_ended(rank) for rank in self._calls):
            return None  # the program may change its tensors now
        return self._layout.chunk(index)

    def _has_ended(self, rank: int) -> bool:
        return all(future.done() for future, _ in self._calls[rank])

    def _on(self, event: Callable[..., list[Send | GiveUp]], relay: int, *words: Any) -> None:
        with self._lock:
            for rank in self._calls:
                if self._has_ended(rank):
                    self._machine.on_ended(rank)
            actions = event(relay, *words)
        self._perform(actions)

    def _on_lost(self, relay: int, error: Exception) -> None:
        name = self._services.name_of_rank(relay)
        _log.info("%s: %s could not take a parcel: %s", self._services.label, name, error)
        self._error = error
        self._on(self._machine.on_lost, relay)

    def _perform(self, actions: Sequence[Send | GiveUp]) -> None:
        machine = self._machine
        for action in actions:
            if isinstance(action, GiveUp):
                self._fail(action.rank)
                continue
            sender = ChunkSender(
                self._services,
                self._parcel,
                self._layout.size,
                action.route,
                self._read,
                partial(self._on, machine.on_done, action.relay),
                partial(self._on_lost, action.relay),
                partial(self._on, machine.on_stalled, action.relay),
            )
            sender.offer(range(chunks_of(self._layout.size)))
            self._services.submit(sender.start)

    def _fail(self, rank: int) -> None:
        """No worker could bring the arguments of these calls."""
        error = getattr(self, "_error", None)
        for _, call in self._calls[rank]:
            name = self._services.name_of_rank(rank)
            call.finish(None, ConnectionLostError(f"The arguments of the call did not reach {name}: {error}"))


class ManyCalls:
    """Makes calls to many workers. Methods may be called from any thread."""

    def __init__(
        self,
        own: WorkerInfo,
        calls: Calls,
        peers: Peers,
        membership: Membership,
        services: WorkerServices,
        copies: SharedCopies,
        is_near: Callable[[Entry], bool],
        most_bytes: int,
    ) -> None:
        self._own = own
        self._calls = calls
        self._peers = peers
        self._membership = membership
        self._services = services
        self._copies = copies
        self._is_near = is_near
        self._most_bytes = most_bytes
        self._numbers = itertools.count(secrets.randbelow(PARCEL_NUMBERS))

    def call(
        self,
        workers: Sequence[WorkerInfo],
        function: Any,
        arguments: Sequence[Arguments],
        timeout: float | None,
        futures: Sequence[Future],
    ) -> None:
        """Call a function on several workers. Each future is completed with the outcome of its own call.

        Args:
            workers: who is called; one may occur several times.
            function: the function.
            arguments: for each call the arguments. Those that are the same object are encoded once.
            timeout: seconds that each call may take; None for no timeout.
            futures: for each call its future.
        """
        if checkpoint_regions.is_used and region_here() is not None:  # it notes or replays each call
            self._call_each(workers, function, arguments, timeout, futures)
            return
        context = current_context.get()
        began = time.monotonic() if recorder.is_on else 0.0
        try:
            encoded = self._encode(function, arguments, context)
        except DeviceMapRequired:  # each worker may have a map of its own
            self._call_each(workers, function, arguments, timeout, futures)
            return
        items: list[_Item] = []
        for worker, pair, future in zip(workers, arguments, futures, strict=True):
            entry = self._membership.find(worker.name)
            if entry is None:
                raise UsageError(f"{self._own.name} could not find destination {worker.name!r}.")
            items.append(_Item(entry, encoded[id(pair)], pair[0], future))
        self._check_sizes(items)
        _Sending(self, items, context, timeout, began).run()

    def _call_each(
        self,
        workers: Sequence[WorkerInfo],
        function: Any,
        arguments: Sequence[Arguments],
        timeout: float | None,
        futures: Sequence[Future],
    ) -> None:
        for worker, (args, kwargs), future in zip(workers, arguments, futures, strict=True):
            self._calls.call_async(worker, function, args, kwargs, timeout, future)

    def _encode(self, function: Any, arguments: Sequence[Arguments], context: Context | None) -> dict[int, _Encoded]:
        """Encode all calls, each object once."""
        encoded: dict[int, _Encoded] = {}
        for pair in arguments:
            if id(pair) in encoded:
                continue
            graph: list[torch.Tensor] | None = None if context is None or not torch.is_grad_enabled() else []
            encoded[id(pair)] = _Encoded(self._calls.encode_for_many(function, *pair, graph), graph)
        return encoded

    def _check_sizes(self, items: Sequence[_Item]) -> None:
        for item in items:
            size = item.encoded.message.nbytes
            most = min(self._most_bytes, item.entry.max_message_bytes)
            if size > most:
                raise UsageError(
                    f"A call of {size} bytes to {item.entry.name} is larger than FARPROP_MAX_MESSAGE_BYTES={most}. "
                    "Nothing was sent. Send it in parts, or raise the limit on every worker."
                )


class _Sending:
    """The calls of one ``ManyCalls.call``, while they are sent."""

    def __init__(
        self, many: ManyCalls, items: Sequence[_Item], context: Context | None, timeout: float | None, began: float
    ) -> None:
        self._many = many
        self._calls = many._calls
        self._services = many._services
        self._items = items
        self._context = context
        self._timeout = timeout
        self._began = began
        self._connections: dict[int, ClientConnection] = {}
        self._parts: dict[int, tuple[Any, list[Any]]] = {}  # by encoded message: its payload and buffers in requests
        self._told: list[int] = []  # ranks that have requests which need the parcel

    def run(self) -> None:
        self._connect()
        reached = [item for item in self._items if item.entry.rank in self._connections]
        parcel = self._make_parcel(reached)
        if parcel is None:
            for item in reached:
                self._send(item)
            return
        try:
            self._send_with(parcel, reached)
        except BaseException:
            # Ctrl-C, or an error of the program: whoever waits for the parcel must not wait for ever.
            self._services.submit(self._drop, parcel.number, list(self._told))
            raise

    def _connect(self) -> None:
        failed: dict[int, Exception] = {}
        for item in self._items:
            rank = item.entry.rank
            if rank not in self._connections and rank not in failed:
                try:
                    self._connections[rank] = self._many._peers.connect(item.entry.name, self._timeout)
                except FarpropError as error:
                    if isinstance(error, UsageError):
                        raise
                    failed[rank] = error
            if rank in failed:
                self._response(item).finish(None, failed[rank])

    # The parcel

    def _make_parcel(self, items: Sequence[_Item]) -> _Parcel | None:
        """What several workers get, if it is worth it; None otherwise."""
        if self._services.dialect.restricted or len({item.entry.rank for item in items}) < 2:
            return None
        found: dict[int, _Encoded] = {id(item.encoded.message): item.encoded for item in items}
        parcel = _Parcel(1 + next(self._many._numbers) % (PARCEL_NUMBERS - 1))
        if len(found) == 1:
            (encoded,) = found.values()
            message = encoded.message
            parts: list[Any] = [parcel.part(buffer) for buffer in message.buffers]
            payload: Any = message.payload
            if len(payload) >= _LONG_PAYLOAD:
                parts.append(parcel.part(memoryview(payload)))
                payload = b""
            self._parts[id(message)] = payload, parts
        else:
            self._find_common(items, parcel)
        return parcel if parcel.layout.size >= _LEAST_BYTES else None

    def _find_common(self, items: Sequence[_Item], parcel: _Parcel) -> None:
        """Find the memory that calls to several workers have in common: usually the same tensor in their arguments."""
        ranks: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        keys: dict[int, list[tuple[int, int]]] = {}
        for item in items:
            message = item.encoded.message
            if id(message) not in keys:
                keys[id(message)] = [(_address(buffer), buffer.nbytes) for buffer in message.buffers]
            for key in keys[id(message)]:
                ranks[key].add(item.entry.rank)
        placed: dict[tuple[int, int], ParcelPart] = {}
        for item in items:
            message = item.encoded.message
            buffers: list[Any] = []
            for key, buffer in zip(keys[id(message)], message.buffers, strict=True):
                if len(ranks[key]) > 1:
                    if key not in placed:
                        placed[key] = parcel.part(buffer)
                    buffers.append(placed[key])
                else:
                    buffers.append(buffer)
            self._parts[id(message)] = message.payload, buffers

    def _send_with(self, parcel: _Parcel, items: Sequence[_Item]) -> None:
        many, own = self._many, self._many._own.id
        near = [item for item in items if item.entry.rank == own or many._is_near(item.entry)]
        far = [item for item in items if item not in near]
        self._send_far(parcel, far)
        if not near:
            return
        copy = many._copies.make(parcel.layout.size)
        if copy is None:  # there is no shared memory
            for item in near:
                self._send(item)
            return
        try:
            parcel.layout.write_to(copy.write)
            parts = {key: (payload, _with_copy(buffers, copy)) for key, (payload, buffers) in self._parts.items()}
            for item in near:
                self._send(item, parts)
        finally:
            copy.release()

    def _send_far(self, parcel: _Parcel, items: Sequence[_Item]) -> None:
        calls: dict[int, list[tuple[Future, FutureResponse]]] = {}
        stops: dict[int, tuple[str, int]] = {}
        for item in items:
            entry = item.entry
            if not self._needs_parcel(item):
                self._send(item)
                continue
            self._told.append(entry.rank)
            call = self._send(item, self._parts)
            if call is not None:
                calls.setdefault(entry.rank, []).append((item.future, call))
                host = entry.net if entry.unix else f"/{entry.name}"
                stops[entry.rank] = host, stops.get(entry.rank, ("", 0))[1] + 1
        if stops:
            route = hosts_of([(host, Stop(rank, uses)) for rank, (host, uses) in stops.items()])
            keep = [item.encoded.message.keep for item in items]
            parcel_id = ParcelId(self._many._own.id, parcel.number)
            outgoing = _Outgoing(self._services, parcel_id, parcel.layout, route, calls, keep)
            self._services.submit(outgoing.start)

    def _needs_parcel(self, item: _Item) -> bool:
        return any(type(part) is ParcelPart for part in self._parts[id(item.encoded.message)][1])

    def _drop(self, number: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            drop(self._services, ParcelId(self._many._own.id, number), rank)

    # Requests

    def _response(self, item: _Item) -> FutureResponse:
        return self._calls.response(self._timeout, item.future, self._context, item.entry.rank)

    def _send(self, item: _Item, parts: dict[int, tuple[Any, list[Any]]] | None = None) -> FutureResponse | None:
        """Send one request; returns the call, or None if it has failed already."""
        encoded = item.encoded.message
        payload, buffers = (encoded.payload, encoded.buffers) if parts is None else parts[id(encoded)]
        message = Message(payload, list(buffers), encoded.keep, encoded.flags, encoded.out_of_band)
        if encoded.name:
            message.name = encoded.name
        else:
            message.function_name = encoded.function_name
        call = self._response(item)
        began = self._began
        if began:
            message.record = CallRecord(RPC_ASYNC, began, message, item.args, waits=False)
        connection = self._connections[item.entry.rank]
        try:
            self._calls.send(message, call, connection, item.encoded.graph)
        except (ConnectionLostError, OverloadedError, InjectedFaultError) as error:
            call.finish(None, error)
            return None
        return call


def _with_copy(buffers: list[Any], copy: SharedCopy) -> list[Any]:
    """The buffers of a request that brings its parcel itself, in memory that it shares with others."""
    own = [part._replace(number=IN_REQUEST) if type(part) is ParcelPart else part for part in buffers]
    return [*own, copy] if any(type(part) is ParcelPart for part in buffers) else own


def _address(buffer: memoryview) -> int:
    return int(numpy.frombuffer(buffer, numpy.uint8).ctypes.data)
