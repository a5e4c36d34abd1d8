"""Sends a parcel to a worker of another host, in chunks, and hears from it who has got the parcel."""

from __future__ import annotations

import logging
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from farprop.errors import ConnectionLostError, FarpropError
from farprop.locks import make_lock
from farprop.protocol.parcels import ChunkWindow, ParcelId, Route
from farprop.runtime.autograd.messages import CallbackCall
from farprop.runtime.future_call import FutureCall
from farprop.runtime.timers import TimerHandle
from farprop.wire.dialect import Dialect
from farprop.wire.message import ANSWER, Message, Method

_log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
_MOST_UNCONFIRMED = 8  # chunks: enough for 1 Gbit/s and 60 ms
STALL_SECONDS = 5.0  # a relay that confirms nothing for so long is stopped, or its link is too slow to wait for


class Network(Protocol):
    """What is needed of the worker."""

    dialect: Dialect

    def is_connected(self, rank: int) -> bool: ...

    def send_method(self, rank: int, method: Method, message: Message, call: FutureCall, system: bool) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> None: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle: ...


def chunks_of(size: int) -> int:
    """How many chunks a parcel of this size has."""
    return -(-size // CHUNK_BYTES)


def message_of(args: Sequence[Any], parts: Iterable[Any] = ()) -> Message:
    """A request of one of the methods of parcels. ``parts`` are memory, and its last arguments."""
    buffers: list[Any] = []
    places: list[pickle.PickleBuffer] = []
    for part in parts:
        buffers.append(part)
        places.append(pickle.PickleBuffer(bytearray()))  # stands for any memory
    payload = pickle.dumps(((*args, *places), {}), 5, buffer_callback=lambda _: None)
    return Message(payload, buffers, buffers)


def drop(network: Network, parcel: ParcelId, rank: int) -> None:
    """Tell a worker that the rest of a parcel does not come from here."""

    def log(answer: Message | None, error: Exception | None) -> None:
        if error is not None:
            _log.debug("rank %d does not hear that a parcel does not come: %s", rank, error)

    if not network.is_connected(rank):
        # It has dropped what came from here when the connection was lost. To dial it would take as long as a host that
        # has vanished is waited for, and so long those behind it would get nothing.
        return
    try:
        network.send_method(rank, Method.PARCEL_DROP, message_of(parcel), CallbackCall(None, log), system=True)
    except FarpropError as error:
        log(None, error)


class ChunkSender:
    """Sends one parcel to the first worker of a route. Exactly one of the first two callbacks is called, once, and
    ``on_stalled`` at most once before it; all on threads of the pool.

    Args:
        network: the worker's.
        parcel: the parcel.
        size: its size in bytes.
        route: who gets it.
        read: returns the memory of a chunk, by its index; None if nobody needs the parcel any more.
        on_report: called with the ranks of those who have not got it.
        on_lost: called with the error if the worker can't be reached, or fails.
        on_stalled: called if the worker does nothing.
    """

    def __init__(
        self,
        network: Network,
        parcel: ParcelId,
        size: int,
        route: Route,
        read: Callable[[int], Sequence[memoryview] | None],
        on_report: Callable[[Sequence[int]], None],
        on_lost: Callable[[Exception], None],
        on_stalled: Callable[[], None],
    ) -> None:
        self._network = network
        self._parcel = parcel
        self._size = size
        self._route = route
        self._to = route[0][0].rank
        self._read = read
        self._on_report = on_report
        self._on_lost = on_lost
        self._on_stalled = on_stalled
        self._lock = make_lock("chunk_sender")
        self._window = ChunkWindow(chunks_of(size), _MOST_UNCONFIRMED)
        # Those behind it have as long each, before this one is taken for stopped.
        self._patience = STALL_SECONDS * (1 + len(route))
        self._is_announced = False
        self._is_over = False
        self._is_stopped = False
        self._heard = time.monotonic()
        self._timer: TimerHandle | None = None

    def start(self) -> None:
        """Dial the worker, if need be, and say what comes. The chunks are sent as they are offered."""
        if self._is_over:  # it was stopped
            return
        args = (*self._parcel, self._size, self._route)
        try:
            self._network.send_method(
                self._to, Method.PARCEL, message_of(args), CallbackCall(None, self._on_end), system=True
            )
        except FarpropError as error:
            self._end(error=error)
            return
        with self._lock:
            self._is_announced = True
            is_stopped = self._is_stopped
        if is_stopped:  # meanwhile: whoever stopped it could not tell the worker
            drop(self._network, self._parcel, self._to)
            return
        self._heard = time.monotonic()
        self._look_later()
        self._send()

    def offer(self, indices: Iterable[int]) -> None:
        """These chunks can be read."""
        with self._lock:
            self._window.offer(indices)

    def go_on(self) -> None:
        """Send chunks that were offered, on a thread of the pool."""
        self._network.submit(self._send)

    def _send(self) -> None:
        while True:
            with self._lock:
                index = self._window.take() if self._is_announced and not self._is_over else None
            if index is None:
                return
            parts = self._read(index)
            if parts is None:
                self.stop()
                self._on_lost(ConnectionLostError("nobody needs the parcel any more"))
                return
            args = (*self._parcel, self._size, len(self._route[0]) > 1, index)
            try:
                message = message_of(args, parts)
                call = CallbackCall(None, self._on_confirmed)
                self._network.send_method(self._to, Method.PARCEL_CHUNK, message, call, system=True)
            except FarpropError as error:
                self._end(error=error)
                return

    def _on_confirmed(self, answer: Message | None, error: Exception | None) -> None:
        if error is None and answer is not None and answer.kind != ANSWER:
            error = self._network.dialect.decode_failure(answer.payload)
        if error is not None:
            self._end(error=error)
            return
        self._heard = time.monotonic()
        with self._lock:
            self._window.on_confirmed()
        self._send()

    def _on_end(self, answer: Message | None, error: Exception | None) -> None:
        missing: Sequence[int] = ()
        if answer is not None:
            dialect = self._network.dialect
            if answer.kind == ANSWER:
                missing = dialect.decode_value(answer.payload, answer.buffers, answer.flags)
            else:
                error = dialect.decode_failure(answer.payload)
        self._end(missing, error)

    def _end(self, missing: Sequence[int] = (), error: Exception | None = None) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            timer = self._timer
        if timer is not None:
            timer.cancel()
        if error is None:
            self._on_report(missing)
        else:
            self._on_lost(error)

    def stop(self) -> None:
        """Send nothing any more, tell the worker so, and call nobody."""
        with self._lock:
            self._is_over = self._is_stopped = True
            timer, is_announced = self._timer, self._is_announced
        if timer is not None:
            timer.cancel()
        if is_announced:
            drop(self._network, self._parcel, self._to)

    # Whether it does anything

    def _look_later(self) -> None:
        self._timer = self._network.call_at(time.monotonic() + STALL_SECONDS / 4, self._look)

    def _look(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._is_over:
                return
            idle = not self._window.awaits_answer and not self._window.is_over
        if idle:
            self._heard = now  # there is nothing that it could confirm
        patience = self._patience if self._window.is_over else STALL_SECONDS
        if now - self._heard > patience:
            self._network.submit(self._on_stalled)
        else:
            self._look_later()
