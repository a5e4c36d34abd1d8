"""Sends the operations on references to other workers: one batch at a time to each, again and again until its reply.

``protocol.references.control_plane`` decides what to send; this decides when, on which thread, and how often.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from farprop.errors import ProtocolError
from farprop.locks import make_lock
from farprop.protocol.references.control_plane import Batch, ControlReply
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.future_call import FutureCall
from farprop.runtime.timers import TimerHandle
from farprop.wire.dialect import Dialect
from farprop.wire.message import ANSWER, Message

_log = logging.getLogger(__name__)

COALESCE_SECONDS = 0.005  # operations that are not urgent wait this long, to share a batch with others
_BATCH_SECONDS = 10.0  # the timeout of one attempt
_LOST_SECONDS = 3 * _BATCH_SECONDS  # an attempt that takes longer than dialling and its timeout will not end
_FIRST_BACKOFF, _LAST_BACKOFF = 0.02, 1.0
_now = time.monotonic


class ControlTransport(Protocol):
    """What the references need of their worker."""

    label: str
    """How log lines name this worker."""
    dialect: Dialect
    is_static: bool
    """Whether the workers of the job stay the same."""

    def name_of_rank(self, rank: int) -> str: ...

    def connect(self, rank: int, timeout: float) -> ClientConnection:
        """The connection to a worker, dialled if there is none. May block; raises what calls raise."""

    def send_batch(self, connection: ClientConnection, batch: Batch, call: FutureCall) -> None:
        """Send a batch, as a call. Raises what calls raise."""

    def is_ready(self, rank: int) -> bool:
        """Whether ``connect`` and ``send_batch`` would not block."""

    def submit(self, function: Callable[..., None], *args: Any) -> None: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle: ...

    def call_at_lockfree(self, when: float, callback: Callable[[], None]) -> None:
        """As ``call_at``, for finalisers: takes no lock."""

    def suspect(self, rank: int) -> None:
        """Find out whether this worker is alive."""


class _BatchCall(FutureCall):
    """The call that carries a batch; its answer is the reply."""

    quick = True
    __slots__ = ("_number", "_peer", "_sender")

    def __init__(self, sender: ControlSender, peer: int, number: int) -> None:
        super().__init__(_BATCH_SECONDS)
        self._sender = sender
        self._peer = peer
        self._number = number

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        if answer is not None and answer.kind == ANSWER:
            self._sender.take_answer(self._peer, self._number, answer)
        else:
            self._sender.unanswered(self._peer)


class ControlSender:
    """Sends batches, and retries them with exponential backoff.

    An attempt may get lost if several interrupts come at once: nobody hears of its end. Such a one expires.

    Args:
        transport: The network and the timers.
        outgoing: Returns the batch to send to a peer, or to send again.
        replied: Takes the reply of a peer.
    """

    def __init__(
        self,
        transport: ControlTransport,
        outgoing: Callable[[int], Batch | None],
        replied: Callable[[int, ControlReply], None],
    ) -> None:
        self._transport = transport
        self._outgoing = outgoing
        self._replied = replied
        self._lock = make_lock("control_sender")
        self._coalescing: set[int] = set()  # peers with operations that are not urgent; a timer is set if there are any
        self._sending: dict[int, float] = {}  # peers that a batch is on its way to: since when
        self._expiry_is_set = False  # a timer looks for attempts that got lost
        self._retries: dict[int, TimerHandle] = {}  # timers that send again
        self._backoffs: dict[int, float] = {}  # how long the last wait before a retry was
        self._closed = False

    @property
    def under_way(self) -> int:
        """To how many peers a batch is on its way or waits to be sent again."""
        return len(self._sending) + len(self._retries)

    def send_later(self, peer: int) -> None:
        """Send within ``COALESCE_SECONDS``, with the operations that come until then."""
        with self._lock:
            if not self._coalescing:
                # Before the peer is noted: Ctrl-C may come between the two, and must not leave it without a timer.
                self._transport.call_at(_now() + COALESCE_SECONDS, self._send_coalesced)
            self._coalescing.add(peer)

    def _send_coalesced(self) -> None:
        with self._lock:
            peers, self._coalescing = self._coalescing, set()
        for peer in peers:
            self.send(peer)

    def send(self, peer: int) -> None:
        """Send now, unless a batch is on its way already: the reply to that one sends the next."""
        ours = False
        now = _now()
        try:
            with self._lock:
                if peer in self._sending or peer in self._retries or self._closed:
                    return
                if not self._expiry_is_set:
                    self._transport.call_at(now + _LOST_SECONDS, self._expire)
                # Nothing is called here, so an interrupt can't come between these.
                self._expiry_is_set = True
                self._sending[peer] = now
                ours = True
            if self._transport.is_ready(peer):
                self._transmit(peer)
            else:
                self._transport.submit(self._transmit, peer)
        except BaseException:
            # Without a call, so that a second interrupt can't come before it.
            if ours and peer in self._sending:
                del self._sending[peer]
            raise

    def _transmit(self, peer: int) -> None:
        if self._outgoing(peer) is None:
            self.go_on(peer)
            return
        try:
            # Before the batch is taken: another process may be found in the peer's place, and what was for the old one
            # must not reach it.
            connection = self._transport.connect(peer, _BATCH_SECONDS)
            batch = self._outgoing(peer)
            if batch is None:
                self.go_on(peer)
                return
            self._transport.send_batch(connection, batch, _BatchCall(self, peer, batch.number))
        except Exception as error:
            name = self._transport.name_of_rank(peer)
            _log.info("%s: can't send operations on references to %s: %s", self._transport.label, name, error)
            self.unanswered(peer)

    def take_answer(self, peer: int, number: int, answer: Message) -> None:
        """The answer to a batch's call arrived."""
        try:
            results = self._transport.dialect.decode_value(answer.payload, answer.buffers, answer.flags)
            if type(results) is not bytes:
                raise ProtocolError(f"it should be bytes, not {type(results).__name__}")
        except Exception as error:
            name = self._transport.name_of_rank(peer)
            text = "%s: %s answered operations on references with a malformed reply: %s"
            _log.error(text, self._transport.label, name, error)
            self.unanswered(peer)
            return
        self.answered(peer, ControlReply(number, results))

    def answered(self, peer: int, reply: ControlReply) -> None:
        """The reply to a batch arrived: go on with the next one."""
        # The machine first: before it has the reply, whoever may send would send the same batch again.
        self._replied(peer, reply)
        with self._lock:
            self._backoffs.pop(peer, None)
        self.go_on(peer)

    def go_on(self, peer: int) -> None:
        """No batch is on its way to this peer any more. Send the operations that were added meanwhile."""
        with self._lock:
            self._sending.pop(peer, None)
        if self._outgoing(peer) is not None:
            self.send(peer)

    def unanswered(self, peer: int) -> None:
        """A batch has no reply, and may have arrived or not: send it again later, with the same number."""
        with self._lock:
            if peer not in self._sending or self._closed:
                return
            backoff = self._backoffs[peer] = min(2 * self._backoffs.get(peer, _FIRST_BACKOFF / 2), _LAST_BACKOFF)
            # An interrupt can't come between the two: nothing is called there.
            self._retries[peer] = self._transport.call_at(_now() + backoff, partial(self._retry, peer))
            del self._sending[peer]
        self._transport.suspect(peer)

    def _expire(self) -> None:
        """Send again what was sent so long ago that nobody waits for its reply."""
        now = _now()
        with self._lock:
            lost = [peer for peer, since in self._sending.items() if now >= since + _LOST_SECONDS]
            self._expiry_is_set = bool(self._sending) and not self._closed
            if self._expiry_is_set:
                self._transport.call_at(now + _LOST_SECONDS, self._expire)
        for peer in lost:
            name = self._transport.name_of_rank(peer)
            _log.info("%s: a batch of operations on references to %s got lost", self._transport.label, name)
            self.unanswered(peer)

    def _retry(self, peer: int) -> None:
        with self._lock:
            self._retries.pop(peer, None)
        self.send(peer)

    def forget(self, peer: int) -> None:
        """The peer is dead: send it nothing any more."""
        with self._lock:
            self._sending.pop(peer, None)
            retry = self._retries.pop(peer, None)
            self._backoffs.pop(peer, None)
        if retry is not None:
            retry.cancel()

    def close(self) -> None:
        """Send nothing any more."""
        with self._lock:
            self._closed = True
            retries, self._retries = self._retries, {}
        for retry in retries.values():
            retry.cancel()
