"""Who reads the answers on a connection that this worker dialled, and how they reach their calls.

Callers follow the leader/followers pattern. The *reader* of the stream is one of the waiting callers (the leader), the
loop, or nobody; the other callers are followers and sleep. Rules that hold here:

- The reader changes only under ``_lock``, and there is at most one.
- There is a reader while calls are open, or while answers to abandoned calls may still arrive. Otherwise the loop only
  watches for the end of the stream.
- User code (callbacks of futures) runs on threads of the pool, never on a caller that reads.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from farprop.errors import ConnectionLostError, ProtocolError
from farprop.locks import make_lock
from farprop.protocol.pending_calls import PendingCalls
from farprop.runtime import first_failure
from farprop.runtime.event_loop import HANGUP, IN, OUT
from farprop.runtime.future_call import AwaitedCall, FutureCall, finish_pair, finish_with
from farprop.runtime.room import LOOK_SECONDS, Room
from farprop.runtime.spinner import Spinner
from farprop.runtime.sync import Waker
from farprop.runtime.thread_pool import ThreadPool
from farprop.transport.connection import Connection
from farprop.wire.message import ANSWER, NOTICE, REFS, RETURNS, Message

_log = logging.getLogger(__name__)

_now = time.monotonic
_get_ident = threading.get_ident


class Waiter:
    """A thread that waits for the answer to a call: its own, or that of a future.

    ``waker`` wakes the caller when its answer has arrived, or when it becomes the reader. It is made when the caller
    first sleeps: most callers read their own answer and never sleep. ``message`` is the request of its own call; it,
    ``thread``, ``began`` and ``timeout`` are for inspection.
    """

    __slots__ = ("began", "has_left", "leads", "message", "outcome", "thread", "timeout", "waker")

    began: float
    timeout: float | None

    def __init__(self, message: Message | None = None) -> None:
        self.message = message
        self.thread = _get_ident()
        self.has_left = False  # it was interrupted, and does not read any more
        self.leads = False  # its thread polls in the loop's place, and does not wait for the waker
        self.outcome: Message | Exception | None = None
        self.waker: Waker | None = None


class _LoopReads:
    """The value of ``_reader`` while the loop reads."""

    has_left = False


_LOOP = _LoopReads()


class AnswerReader:
    """See the module's rules. ``ClientConnection`` adds the calls.

    It is a base class and not an object of its own: who reads depends on the open calls, so both change under one lock,
    and every call looks at it several times, which would take two attributes instead of one.
    """

    _room: Room

    def __init__(
        self, threads: ThreadPool, own_label: str, peer: str, rank: int, on_refs: Callable[[int, Message], Any]
    ) -> None:
        self.peer = peer
        self.rank = rank
        self._threads = threads
        self._loop = threads.loop
        self._own_label = own_label
        self._on_refs = on_refs
        self._lock = make_lock("client_connection")
        self._calls: PendingCalls[Waiter | FutureCall] = PendingCalls()
        self._given_up = 0  # abandoned calls whose answers may still arrive, with references and segments
        self._reader: Waiter | _LoopReads | None = None
        self._is_delivering = False  # answers have left the table of calls, and are not with their calls yet
        self._loop_in_stream = False  # the loop is reading from the stream right now
        self._followers: dict[Waiter, None] = {}  # sleeping callers, in the order in which they become reader
        self._wants_input = False
        self._wants_output = False
        self._hung_up = False
        self._lost: str | None = None
        self._spinner = Spinner()
        self._poller = select.poll()  # used by the reader
        self._connection: Connection

    def lose(self, reason: str) -> None:
        """The connection is lost."""
        raise NotImplementedError

    # Who reads

    def _join_readers(self, waiter: Waiter, pooled: bool) -> None:
        """Make this thread the reader, or a follower of the reader. Called under the lock."""
        reader = self._reader
        if reader is not None and not reader.has_left and (reader is not _LOOP or self._loop_in_stream or pooled):
            self._followers[waiter] = None
        elif pooled and self._threads.is_polling_thread():
            self._loop_reads()
        else:
            # Read here instead of in the loop: waking the loop and then this thread would take much longer.
            self._reader = waiter
            if self._wants_input:
                self._wants_input = False
                self._set_events()

    def _wait(self, waiter: Waiter, deadline: float | None, pooled: bool) -> None:
        """Wait until there is an outcome, or until the deadline."""
        threads = self._threads
        while waiter.outcome is None:
            if not pooled:
                self._await_answer(waiter, deadline)
            elif self._reader is _LOOP and threads.is_polling_thread():
                # Another caller may become the reader, deliver our answer, or make this caller the reader.
                waiter.leads = True
                ended = threads.poll_until(lambda: waiter.outcome is not None or self._reader is waiter, deadline)
                waiter.leads = False
                if not ended:
                    threads.yield_polling()
            else:
                with threads.blocked():
                    self._await_answer(waiter, deadline)
            if deadline is not None and waiter.outcome is None and _now() >= deadline:
                return

    def _await_answer(self, call: Waiter, deadline: float | None) -> None:
        """Read if this caller is the reader, else sleep until its answer has arrived or it becomes the reader."""
        if self._reader is call:
            self._read_for(call, deadline)
            return
        if call.waker is None:
            call.waker = Waker()
            # The waking thread reads ``waker`` last, so it may have missed the new one: check again.
            if call.outcome is not None or self._reader is call:
                return
        left = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, max(0.0, deadline - _now()))
        if not call.waker.wait(timeout=left):
            self._take_over(call)

    def _take_over(self, call: Waiter) -> None:
        """Nobody has woken this caller for a while: read if nobody reads. An interrupt may have lost the wake-up."""
        with self._lock:
            reader = self._reader
            if (reader is None or reader.has_left) and call.outcome is None and self._lost is None:
                self._followers.pop(call, None)
                self._join_readers(call, pooled=False)

    def _read_for(self, call: Waiter, deadline: float | None) -> None:
        """Read until this caller's answer has arrived or its deadline has passed, then hand over to the next reader."""
        in_stream = False
        try:
            while call.outcome is None and self._input_comes(deadline):
                in_stream = True
                try:
                    messages = self._connection.receive()
                except BlockingIOError:
                    continue
                if messages is None:
                    self.lose("it closed the connection")
                    return
                self._deliver(messages, self._threads.submit)
                in_stream = False
        except ProtocolError as error:
            self.lose(f"it broke the protocol: {error}")
        except BaseException as error:
            # Ctrl-C or an error between reading bytes and delivering them: the stream is no longer in sync.
            if in_stream:
                self.lose(f"reading from it was interrupted by {type(error).__name__}")
            raise
        finally:
            self._hand_over(call)

    def _input_comes(self, deadline: float | None) -> bool:
        """Wait until there is something to read; False at the deadline. An interrupt here does no harm."""
        poll = self._poller.poll
        if self._spinner.poll(poll, self._loop.activity):
            return True
        began = _now()
        # Not for longer: whoever loses the connection closes the descriptor, and another one may get its number.
        left = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, max(0.0, deadline - began))
        events = poll(left * 1000)
        now = _now()
        self._spinner.slept(now - began)
        return bool(events) or deadline is None or now < deadline

    def _deliver(self, messages: list[Message], run: Callable[..., None]) -> None:
        answered: list[list[Any]] = []
        for message in messages:
            if not ANSWER <= message.kind <= NOTICE:
                raise ProtocolError(f"message kind {message.kind} where an answer should be")
            if message.flags & (REFS | RETURNS):
                # Also for answers to abandoned calls: their references are released, not leaked.
                self._on_refs(self.rank, message)
        try:
            with self._lock:
                self._is_delivering = True
                for message in reversed(messages):
                    if message.kind != NOTICE:
                        pair: list[Any] = [None, message]
                        answered.append(pair)
                        # To store is not a call: an interrupt finds the call in the table or in the pair.
                        call = pair[0] = self._calls.answer(message.call_id)
                        if call is None and self._given_up:
                            self._given_up -= 1
                    elif message.payload:
                        first_failure.told(bytes(message.payload).decode(errors="replace"))
                if self._room.waiters:
                    self._room.wake()
            while answered:
                self._deliver_one(answered[-1], run)
                answered.pop()
        except BaseException:
            # Ctrl-C: the answers of other callers have left the table, and must not get lost.
            for pair in answered:
                self._threads.submit(self._deliver_one, pair, self._threads.submit)
            raise
        finally:
            self._is_delivering = False

    def _deliver_one(self, pair: list[Any], run: Callable[..., None]) -> None:
        """Deliver an answer to its call. Delivering it twice does no harm."""
        if not pair:
            return
        call, message = pair
        _log.debug("%s: call %d is answered by %s (rank %d)", self._own_label, message.call_id, self.peer, self.rank)
        if call is None:
            if message.received_refs is not None:
                run(pair.clear)  # abandoned; this may drop the last reference to a user's object
            return
        if isinstance(call, Waiter):
            call.outcome = message
            if call is not self._reader:  # the reader is this thread
                self._wake(call)
            return
        if call.record is not None:
            call.record.on_answer(message)
        if call.quick:
            call.finish(message, None)
        elif isinstance(call, AwaitedCall) and call.waiter is not None:
            self._tell_waiter(call, call.waiter, message)
            pair.clear()
        else:
            call = message = None
            run(finish_pair, pair)

    def _fail(self, call: FutureCall, error: Exception) -> None:
        """End a call that has left the table with an error."""
        if call.record is not None:
            call.record.on_error(error)
        if isinstance(call, AwaitedCall) and call.waiter is not None:
            self._tell_waiter(call, call.waiter, error)
        else:
            self._threads.submit(call.finish, None, error)

    def _tell_waiter(self, call: FutureCall, waiter: Waiter, outcome: Message | Exception) -> None:
        """Give the outcome to the thread that waits for a future."""
        waiter.outcome = outcome
        if waiter.has_left:  # see _stop_waiting_for
            self._threads.submit(finish_with, call, outcome)
        elif waiter is not self._reader:
            self._wake(waiter)

    def _wake(self, call: Waiter) -> None:
        if call.waker is not None:
            call.waker.wake()
        if call.leads and not self._threads.is_polling_thread():
            self._loop.wake()

    def _hand_over(self, call: Waiter) -> None:
        """This caller does not read any more: make the next caller, the loop or nobody the reader."""
        with self._lock:
            reader = self._reader
            if reader is not call and reader is not None and not reader.has_left:
                return
            self._reader = None
            while self._followers:
                follower = next(iter(self._followers))
                del self._followers[follower]
                if follower.outcome is None:
                    self._reader = follower
                    self._wake(follower)
                    return
            if self._lost is not None:
                return
            if self._hung_up:
                # Answers may be left before the end of the stream: the loop reads up to it.
                self._hung_up = False
                self._reader = _LOOP
                self._wants_input = True
                self._loop.add(self._connection.fd, IN | HANGUP, self._on_events)
            elif len(self._calls) or self._given_up:
                self._loop_reads()

    def _loop_reads(self) -> None:
        self._reader = _LOOP
        if not self._wants_input:
            self._wants_input = True
            self._set_events()

    def _set_events(self) -> None:
        if self._lost is not None or self._hung_up:
            return  # the descriptor is closed, or not registered with the loop for now
        events = HANGUP | (IN if self._wants_input else 0) | (OUT if self._wants_output else 0)
        self._loop.change(self._connection.fd, events)

    def want_output(self, _: Connection) -> None:
        """The connection's outbox is no longer empty: watch for writability."""
        with self._lock:
            self._wants_output = True
            if self._lost is None:
                self._set_events()

    def _on_events(self, mask: int) -> None:
        """Called by the loop."""
        if mask & OUT:
            try:
                flushed = self._connection.flush()
                if flushed or self._room.waiters:
                    with self._lock:
                        self._room.wake()
                        if flushed and not self._connection.outbox_bytes:
                            self._wants_output = False
                            self._set_events()
            except ConnectionLostError as error:
                self.lose(str(error))
                return
        if mask & ~OUT == 0:
            return
        with self._lock:
            if self._reader is not _LOOP and not mask & ~(IN | OUT):
                return  # a caller became the reader after the loop had polled
            if self._reader is None:
                self._reader = _LOOP  # hang-up: read up to the end of the stream
            elif self._reader is not _LOOP:
                # The reader will find the end itself. Until then a level-triggered hang-up would keep the loop busy.
                self._hung_up = True
                self._loop.remove(self._connection.fd)
                return
            self._loop_in_stream = True
        try:
            self._read_in_loop()
        finally:
            self._loop_in_stream = False

    def _read_in_loop(self) -> None:
        try:
            messages = self._connection.receive()
            if messages is None:
                self.lose("it closed the connection")
                return
            self._deliver(messages, self._threads.push_answer)
            self._connection.uncork()
        except BlockingIOError:
            pass
        except ConnectionLostError as error:
            self.lose(str(error))
            return
        except ProtocolError as error:
            self.lose(f"it broke the protocol: {error}")
            return
        except Exception as error:
            _log.exception("farprop: unexpected error while reading from %s", self.peer)
            self.lose(f"reading from it failed: {error!r}")
            return
        if not len(self._calls) and not self._given_up:
            with self._lock:
                if self._reader is _LOOP and not len(self._calls) and not self._given_up:
                    self._reader = None
                    if self._wants_input:
                        self._wants_input = False
                        self._set_events()
