"""A connection that this worker dialled: sends requests, and ends them with their answers or with errors.

Every call is opened once, in ``_calls``, and ends exactly once: by its answer, at its deadline, when it is cancelled,
or when the connection is lost. Who reads the answers is the subject of ``answer_reader``.
"""

from __future__ import annotations

import itertools
import logging
import select
import threading
import time
from collections.abc import Callable
from typing import Any, cast

from farprop.config import Settings
from farprop.errors import CallCancelledError, ConnectionLostError, not_run
from farprop.runtime.answer_reader import AnswerReader, Waiter
from farprop.runtime.call_records import METHOD_AT, called_name
from farprop.runtime.event_loop import HANGUP
from farprop.runtime.first_failure import explained
from farprop.runtime.future_call import AwaitedCall, FutureCall, cancelled_error, finish_with, timeout_error
from farprop.runtime.host_probe import HostProbe
from farprop.runtime.room import Room
from farprop.runtime.thread_pool import ThreadPool, check_may_block, coroutine_of, this_thread
from farprop.runtime.timers import TimerHandle
from farprop.transport.connection import Connection
from farprop.wire.function_names import shown_name
from farprop.wire.message import SYSTEM, Message, cancel

_log = logging.getLogger(__name__)
_DEBUG = logging.DEBUG

_now = time.monotonic
_get_ident = threading.get_ident
# With more open calls than this, small requests are sent together, after a short delay at most.
_PIPELINED = 16
_UNCORK_SECONDS = 0.001
_FAILED_AT_ONCE = 100  # calls that the thread which loses a connection fails itself

_DEFAULTS = Settings()


def _flags_of(call: Waiter | FutureCall) -> int:
    """The flags of an open call's request."""
    if isinstance(call, FutureCall):
        return call.origin[1]
    return 0 if call.message is None else call.message.flags


class ClientConnection(AnswerReader):
    """See the module's rules."""

    def __init__(
        self,
        threads: ThreadPool,
        own_label: str,
        peer: str,
        rank: int,
        on_lost: Callable[[ClientConnection, str], None],
        on_refs: Callable[[int, Message], Any],
        settings: Settings = _DEFAULTS,
    ) -> None:
        super().__init__(threads, own_label, peer, rank, on_refs)
        self.instance = ""  # which process it is, set by who has dialled it
        self.lost = False
        self.sent = 0
        self._on_lost = on_lost
        self._ids = itertools.count(1)
        self._room = Room(peer, self._lock, self._calls, lambda: self.outbox_bytes, threads, settings)
        self._probe = HostProbe(self._loop, self._lock, self._calls, lambda: self._connection.probe(), self.lose)
        self._deadline_timer: TimerHandle | None = None  # for the nearest deadline of the open calls
        self._uncork_due = False  # a timer will send the requests that wait for more
        self._to_fail: list[Waiter | FutureCall] = []  # calls that were open when the connection was lost
        self._shares_clock = False

    def attach(self, connection: Connection) -> None:
        self._connection = connection
        self._shares_clock = connection.shares_clock
        self._poller.register(connection.fd, select.POLLIN)
        self._probe.is_due = not connection.can_probe
        self._loop.add(connection.fd, HANGUP, self._on_events)

    def wrap(self, wrapped: Callable[[Any], Any]) -> None:
        """Replace the connection with a wrapper around it."""
        self._connection = wrapped(self._connection)

    @property
    def has_room(self) -> bool:
        """Whether a call would be sent without waiting for room in the outbox."""
        return self._connection.outbox_bytes <= self._room.most_outbox

    @property
    def takes_calls(self) -> bool:
        """Whether a call of the program would be sent without waiting for anything."""
        return self.has_room and self._calls.bytes <= self._room.most_in_flight

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    @property
    def open_work(self) -> int:
        """As ``open_calls``, without farprop's own, and with answers that are on their way to their calls."""
        with self._lock:
            return self._is_delivering + sum(not _flags_of(call) & SYSTEM for _, call, _ in self._calls.all())

    def pending(self) -> list[tuple[int, Waiter | FutureCall, float | None]]:
        """The calls without an answer, with their ids and deadlines. For inspection."""
        with self._lock:
            return self._calls.all()

    @property
    def outbox_bytes(self) -> int:
        return self._connection.outbox_bytes

    @property
    def lent_bytes(self) -> int:
        """Shared memory that the peer has borrowed."""
        sender = getattr(self._connection, "sender", None)
        return 0 if sender is None else sender.lent_bytes

    # Calls

    def call_sync(self, message: Message, timeout: float | None) -> Message:
        """Send a request and wait for its answer.

        Args:
            message: the request.
            timeout: in seconds; None for no timeout.

        Returns:
            The answer.

        Raises:
            ConnectionLostError: the connection broke before the answer arrived.
            RpcTimeoutError: no answer arrived in time.
        """
        call = Waiter(message)
        call_id = next(self._ids)
        threads = self._threads
        pooled = getattr(this_thread, "pool", None) is threads
        if not pooled:
            if hasattr(this_thread, "runs_coroutines_of"):
                check_may_block("A call that waits for its answer")
            self._loop.called_from_outside = True
        left = timeout
        room = self._room
        if self._connection.outbox_bytes > room.most_outbox or self._calls.bytes > room.most_in_flight:
            left = room.wait(message, pooled, timeout)
        began = call.began = _now()
        call.timeout = left
        deadline = None if left is None else began + left
        # From here on Ctrl-C must leave nothing of this call behind.
        try:
            with self._lock:
                if self._lost is not None:
                    raise not_run(self._lost_error())
                self._calls.open(call_id, call, None, message.memory)
                if not self._probe.is_due:
                    self._probe.soon()
                self._join_readers(call, pooled)
                self.sent += not message.flags & SYSTEM
            self._send(message, call_id, deadline if self._shares_clock else left)
            self._wait(call, deadline, pooled)
            if call.outcome is None or self._reader is call or call in self._followers:
                self._leave(call, call_id)
        except BaseException:
            call.has_left = True
            self._leave(call, call_id, message.sent)
            raise
        outcome = call.outcome
        if outcome is None:
            # Only a deadline ends the loop without an outcome.
            raise timeout_error(self.peer, cast(float, timeout))
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def wait_for(self, call: AwaitedCall, call_id: int, deadline: float | None) -> None:
        """Wait for an open asynchronous call on this thread, and finish it here.

        Returns at once if the call has ended already or another thread waits for it, and at the deadline: then the call
        is finished on a thread of the pool.
        """
        waiter = Waiter()
        pooled = getattr(this_thread, "pool", None) is self._threads
        if not pooled:
            self._loop.called_from_outside = True
        try:
            with self._lock:
                if call.waiter is not None or call_id not in self._calls:
                    return
                call.waiter = waiter
                self._join_readers(waiter, pooled)
            if self._connection.has_corked:
                self._uncork()
            self._wait(waiter, deadline, pooled)
            if waiter.outcome is None or self._reader is waiter:
                self._stop_waiting_for(call, call_id, waiter)
                return
            if waiter in self._followers:
                with self._lock:
                    self._followers.pop(waiter, None)
            finish_with(call, waiter.outcome)
        except BaseException:
            waiter.has_left = True
            self._stop_waiting_for(call, call_id, waiter)
            raise

    def _stop_waiting_for(self, call: AwaitedCall, call_id: int, waiter: Waiter) -> None:
        with self._lock:
            if call.waiter is waiter and call_id in self._calls:
                call.waiter = None  # a thread of the pool finishes it
            self._followers.pop(waiter, None)
        # The outcome may have been delivered, or be about to: whoever sees both fields set has the call finished.
        waiter.has_left = True
        if waiter.outcome is not None:
            self._threads.submit(finish_with, call, waiter.outcome)
        self._hand_over(waiter)

    def call_async(self, message: Message, call: FutureCall) -> None:
        """Send a request; ``call.finish`` is called once with its outcome."""
        timeout = call.timeout
        call_id = message.call_id = next(self._ids)
        pooled = getattr(this_thread, "pool", None) is self._threads
        if not pooled:
            self._loop.called_from_outside = True
        left = timeout
        room = self._room
        if self._connection.outbox_bytes > room.most_outbox or self._calls.bytes > room.most_in_flight:
            left = room.wait(message, pooled, timeout)
        began = _now()
        deadline = None if left is None else began + left
        me = _get_ident()
        serves = self._threads.serving.get(me) or coroutine_of.get()
        parent = None if serves is None else (serves.connection.peer, serves.call_id)
        name = message.name
        if not name or name in METHOD_AT:
            name = called_name(message)
        call.origin = name, message.flags, message.autograd, began, me, parent
        call.record = message.record
        try:
            with self._lock:
                if self._lost is not None:
                    raise not_run(self._lost_error())
                self._calls.open(call_id, call, deadline, message.memory)
                if not self._probe.is_due:
                    self._probe.soon()
                timer = self._deadline_timer
                reader = self._reader
                if reader is None or reader.has_left:
                    self._loop_reads()
                self.sent += not message.flags & SYSTEM
                # With many open calls, small requests are sent together; a timer sends the last ones.
                more = len(self._calls) > _PIPELINED
            if deadline is not None and (timer is None or deadline < timer.when):
                self._watch_deadlines()
            self._send(message, call_id, deadline if self._shares_clock else left, more)
            if more:
                self._uncork_soon()
        except BaseException:
            with self._lock:
                ours = self._calls.answer(call_id) is not None
                self._given_up += ours and message.sent
            raise

    def cancel(self, call: FutureCall, call_id: int) -> bool:
        """End an open asynchronous call with ``CallCancelledError``, on this thread, and tell the callee.

        Returns:
            False if it has ended before.
        """
        error = cancelled_error(self.peer, shown_name(call.origin[0]).removeprefix(":"))
        try:
            with self._lock:
                if self._calls.answer(call_id) is None:
                    return False
                self._given_up += 1
                self._room.wake()
            self._end_cancelled(call, call_id, error)
        except BaseException:
            # Ctrl-C: to end it twice does no harm.
            if call_id not in self._calls:
                self._threads.submit(self._end_cancelled, call, call_id, error)
            raise
        return True

    def _end_cancelled(self, call: FutureCall, call_id: int, error: CallCancelledError) -> None:
        if call.record is not None:
            call.record.on_error(error)
        call.finish(None, error)
        if isinstance(call, AwaitedCall) and call.waiter is not None:
            self._tell_waiter(call, call.waiter, error)
        # The request was sent before, or waits to be sent, so the callee reads it first.
        more = len(self._calls) > _PIPELINED
        try:
            self._connection.send(cancel(call_id), more)
            if more:
                self._uncork_soon()
        except ConnectionLostError as lost:
            self.lose(str(lost))
        except BaseException as interrupt:
            self.lose(f"sending to it was interrupted by {type(interrupt).__name__}")
            raise

    def _watch_deadlines(self) -> None:
        """Set the timer for the nearest deadline."""
        with self._lock:
            deadline = self._calls.next_deadline()
            # The new one first: an interrupt must not leave the calls without any.
            following = None if deadline is None else self._loop.call_at(deadline, self._on_deadline)
            timer, self._deadline_timer = self._deadline_timer, following
            if timer is not None:
                timer.cancel()

    def _on_deadline(self) -> None:
        """Fail the asynchronous calls whose deadlines have passed."""
        with self._lock:
            expired = self._calls.expire(_now())
            self._given_up += len(expired)
            self._room.wake()
        self._watch_deadlines()
        for call in expired:
            if isinstance(call, FutureCall) and call.timeout is not None:
                self._fail(call, timeout_error(self.peer, call.timeout))

    def keep_probing(self) -> None:
        """Find out whether the other host has vanished although no calls are open."""
        self._probe.keep_on()

    def _uncork_soon(self) -> None:
        # Called after the request was queued, so a timer that has not run yet will send it.
        if self._uncork_due:
            return
        with self._lock:
            if not self._uncork_due:
                self._loop.call_at(_now() + _UNCORK_SECONDS, self._uncork)
                self._uncork_due = True

    def _uncork(self) -> None:
        with self._lock:  # the timer may be due before the thread that has set it has noted that
            self._uncork_due = False
        try:
            self._connection.uncork()
        except ConnectionLostError as error:
            self.lose(str(error))
        except BaseException as error:
            self.lose(f"sending to it was interrupted by {type(error).__name__}")
            raise

    def _send(self, message: Message, call_id: int, seconds: float | None, more: bool = False) -> None:
        """Send a request, unless the call has ended already because the connection is lost.

        Args:
            message: the request.
            call_id: the id of the call.
            seconds: its deadline if the callee has the same clock, else its timeout.
            more: whether it may wait for others.
        """
        message.call_id = call_id
        message.seconds = seconds
        if _log.isEnabledFor(_DEBUG):
            text = "%s: sends call %d to %s (rank %d): %s"
            _log.debug(text, self._own_label, call_id, self.peer, self.rank, shown_name(message.name))
        record = message.record
        if record is not None:
            record.on_sending(self.peer, call_id, self._threads.serving.get(_get_ident()) or coroutine_of.get())
        try:
            self._connection.send(message, more)
            message.sent = True
            if record is not None:
                record.on_sent()
        except ConnectionLostError as error:
            # The callee can't have read all of it.
            with self._lock:
                is_open = self._calls.answer(call_id) is not None
            self.lose(str(error))
            if is_open:
                not_run(error)
                error.worker = self.peer
                raise
        except Exception:
            raise  # nothing was sent
        except BaseException as error:
            self.lose(f"sending to it was interrupted by {type(error).__name__}")  # half a message may have been sent
            raise

    def _leave(self, call: Waiter, call_id: int, sent: bool = True) -> None:
        """The caller stops waiting. Its answer is dropped if it arrives later."""
        with self._lock:
            self._followers.pop(call, None)
            self._given_up += self._calls.answer(call_id) is not None and sent
            self._room.wake()
        self._hand_over(call)

    # Ending

    def lose(self, reason: str) -> None:
        """The connection is lost: fail every open call."""
        with self._lock:
            if self._lost is not None:
                return
            self._followers.clear()
            self._to_fail = self._calls.lost()
            self._room.is_closed = self._probe.is_closed = True
            self._lost = reason
            self.lost = True
        self._end()

    def _end(self) -> None:
        """Do what follows from the loss. To do it again does no harm: an interrupt leaves the rest to the pool."""
        try:
            with self._lock:
                self._room.wake()
            timer, self._deadline_timer = self._deadline_timer, None
            if timer is not None:
                timer.cancel()
            self._loop.remove(self._connection.fd)
            self._connection.close()
            self._on_lost(self, self._lost or "")
            self._fail_open_calls(_FAILED_AT_ONCE)
        except BaseException:
            self._threads.submit(self._end)
            raise

    def _fail_open_calls(self, most: int | None = None) -> None:
        """Fail the calls that were open. The thread that lost the connection has a deadline, too: with very many calls,
        the pool fails those beyond ``most``.
        """
        while self._to_fail:
            if most is not None:
                most -= 1
                if most < 0:
                    self._threads.submit(self._fail_open_calls)
                    return
            call = self._to_fail[-1]
            error = self._lost_error()
            if isinstance(call, Waiter):
                call.outcome = error
                self._wake(call)
            else:
                self._fail(call, error)
            self._to_fail.pop()

    def _lost_error(self) -> ConnectionLostError:
        error = ConnectionLostError(
            f"Lost the connection to {self.peer}: {self._lost}. It has shut down or died, or the network is cut."
        )
        error.worker = self.peer
        return explained(error)

    def send(self, notice: Message) -> None:
        """Send a message that has no answer; raises as ``Connection.send`` does."""
        self._connection.send(notice)

    def give_back(self) -> None:
        try:
            self._connection.give_back()
        except ConnectionLostError as error:
            self.lose(str(error))

    def abandon(self) -> None:
        self._connection.abandon()

    def validate(self) -> None:
        with self._lock:
            self._calls.validate()
            waited_for = len(self._calls) + self._given_up
            assert self._reader is not None or not waited_for or self._lost is not None
