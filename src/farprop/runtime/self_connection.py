"""The connection of a worker to itself: calls that touch no socket and do not wait for the event loop.

A request goes straight to the server's queue, and a thread of the pool runs it: never the calling thread, because a
call must end at its deadline even if its function does not. Arguments and results are encoded and decoded as in any
call, so they are copies at the other end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from farprop.errors import ConnectionLostError
from farprop.protocol.served_calls import ServedCalls
from farprop.runtime.answer_reader import Waiter
from farprop.runtime.client_connection import ClientConnection
from farprop.transport.shared_copies import SharedCopy
from farprop.wire.message import CANCEL, REQUEST, Message, ParcelPart


def _own(buffer: Any) -> Any:
    """The bytes of a buffer for the receiver alone."""
    if type(buffer) is ParcelPart:
        return buffer
    if type(buffer) is SharedCopy:
        return buffer.private()
    return memoryview(bytearray(buffer))


class Loopback:
    """Both ends of the connection: requests and cancels go to ``accept``, answers to ``deliver``, a cut to
    ``on_hung_up``.
    """

    fd = -1
    outbox_bytes = 0
    has_corked = False

    def __init__(self, peer: str, rank: int, accept: Callable[[Loopback, Message], None]) -> None:
        self.peer = peer
        self.rank = rank
        self.closed = False
        self.served: ServedCalls[Callable[[], object]] = ServedCalls()
        # Requests that the server has not accepted yet, with the times of their arrival. Whichever thread takes the
        # token accepts them, so that they keep their order.
        self.arrivals: deque[tuple[Message, float]] = deque()
        self.token = deque([True])
        self.deliver: Callable[[Message], None]
        self.on_hung_up: Callable[[], None]
        self._accept = accept

    def send(self, message: Message, more: bool = False) -> None:
        if self.closed:
            raise ConnectionLostError(f"The connection to {self.peer} is closed.")
        if message.buffers:
            # The sender may change its tensors, and the receiver may change what it gets.
            message.buffers = [_own(buffer) for buffer in message.buffers]
            message.keep = None
        message.sent = True
        if message.kind == REQUEST:
            # Here already: a thread that cancels the call may be faster than the one that takes the request.
            self.served.open[message.call_id] = None
            try:
                self._accept(self, message)
            except BaseException:
                self.served.answered(message.call_id)
                raise
        elif message.kind == CANCEL:
            self._accept(self, message)
        else:
            self.deliver(message)

    def uncork(self) -> None:
        """Nothing waits for more."""

    def give_back(self) -> None:
        """There are no segments."""

    def close(self) -> bool:
        was_open, self.closed = not self.closed, True
        return was_open

    def abandon(self) -> None:
        self.closed = True

    def hang_up(self) -> None:
        """End it as a broken network would, for fault plans."""
        self.closed = True
        self.on_hung_up()


class SelfConnection(ClientConnection):
    """There is nothing to read, so nobody is the reader: all callers are followers, and the server wakes them.

    They don't spin: the thread that runs the request needs the interpreter's lock, and would share it with them.
    """

    def open(self, accept: Callable[[Loopback, Message], None]) -> None:
        """Begin; ``accept`` takes the requests."""
        loopback = Loopback(self.peer, self.rank, accept)
        loopback.deliver = self._on_answer
        loopback.on_hung_up = lambda: self._threads.submit(self.lose, "it closed the connection")
        self._connection = loopback  # type: ignore[assignment]

    def _on_answer(self, message: Message) -> None:
        self._deliver([message], self._threads.submit)

    def _join_readers(self, waiter: Waiter, pooled: bool) -> None:
        self._followers[waiter] = None

    def _loop_reads(self) -> None:
        """The loop has nothing to read."""

    def _hand_over(self, call: Waiter) -> None:
        """Nobody takes over."""

    def _take_over(self, call: Waiter) -> None:
        """There is nothing to read."""

    def _set_events(self) -> None:
        """There is no descriptor."""

    def validate(self) -> None:
        with self._lock:
            self._calls.validate()
            assert self._reader is None
