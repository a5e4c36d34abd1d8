"""A connection that this worker dialled: sends requests and receives answers.

Callers follow the leader/followers pattern. The *reader* of the stream is one of the waiting callers (the leader), the
loop, or nobody; the other callers are followers and sleep. Rules that hold here:

- The reader changes only under ``_lock``, and there is at most one.
- There is a reader while calls are open, or while answers to abandoned calls may still arrive. Otherwise the loop only
  watches for the end of the stream.
- User code (callbacks of futures) runs on threads of the pool, never on a caller that reads.
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
from farprop.errors import ConnectionLostError, OverloadedError, ProtocolError, RpcTimeoutError, not_run
from farprop.locks import make_lock
from farprop.protocol.host_liveness import PROBE_SECONDS, HostState
from farprop.protocol.pending_calls import PendingCalls
from farprop.runtime.event_loop import HANGUP, IN, OUT
from farprop.runtime.spinner import Spinner
from farprop.runtime.sync import Waker
from farprop.runtime.thread_pool import ThreadPool, coroutine_of, this_thread
from farprop.runtime.timers import TimerHandle
from farprop.transport.connection import Connection
from farprop.wire.function_names import shown_name
from farprop.wire.message import NOTICE, REFS, REQUEST, RETURNS, SYSTEM, AutogradHead, Message

_log = logging.getLogger(__name__)
_DEBUG = logging.DEBUG

_now = time.monotonic
_get_ident = threading.get_ident
# With more open calls than this, small requests are sent together, after a short delay at most.
_PIPELINED = 16
_UNCORK_SECONDS = 0.001
_FAILED_AT_ONCE = 100  # calls that the thread which loses a connection fails itself
_LOOK_SECONDS = 0.5  # a caller that sleeps looks this often whether somebody reads


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


# What inspection shows of an asynchronous call: the function's name, flags, autograd head, when and by which thread it
# was made, and for which request of which worker. It does not keep the call's request alive, nor that other one.
Origin = tuple[bytes, int, AutogradHead | None, float, int, tuple[str, int] | None]


class FutureCall:
    """An asynchronous call. ``finish`` is called once with its outcome, on a thread of the pool.

    If ``quick`` is set, the reader calls ``finish`` itself. This is for farprop's own calls, whose ``finish`` is short
    and runs no user code. ``timeout`` is in seconds, or None. ``origin`` is for inspection, once it was sent.
    """

    __slots__ = ("origin", "timeout")

    origin: Origin

    quick = False

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        raise NotImplementedError


class AwaitedCall(FutureCall):
    """An asynchronous call that a thread may wait for (``wait_for``). The ``waiter``, if there is one, finishes it.

    To finish it a second time must do no harm: a waiter that is interrupted may leave it to the pool, too.
    """

    __slots__ = ("waiter",)

    def __init__(self, timeout: float | None) -> None:
        super().__init__(timeout)
        self.waiter: Waiter | None = None


_DEFAULTS = Settings()


class _LoopReads:
    """The value of ``_reader`` while the loop reads."""

    has_left = False


_LOOP = _LoopReads()


def timeout_error(peer: str, timeout: float) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms) without an answer from {peer}. It may still be "
        "running there. Pass a larger timeout to the call, or 0 to disable it."
    )


def _flags_of(call: Waiter | FutureCall) -> int:
    """The flags of an open call's request."""
    if isinstance(call, FutureCall):
        return call.origin[1]
    return 0 if call.message is None else call.message.flags


def _finish_with(call: FutureCall, outcome: Message | Exception) -> None:
    if isinstance(outcome, Exception):
        call.finish(None, outcome)
    else:
        call.finish(outcome, None)


def _finish(pair: list[Any]) -> None:
    # The reader still holds the list. Emptying it here keeps the reader from dropping the last reference to a user's
    # object: a finaliser that makes a call would wait for the reader.
    if pair:
        call, answer = pair
        pair.clear()
        call.finish(answer, None)


class ClientConnection:
    """See the module's rules.

    Who reads is not a class of its own: it depends on the open calls, so both change under one lock, and every call
    looks at it several times, which would take two attributes instead of one.
    """

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
        self.peer = peer
        self.rank = rank
        self.instance = ""  # which process it is, set by who has dialled it
        self.lost = False
        self.sent = 0
        self._threads = threads
        self._loop = threads.loop
        self._own_label = own_label
        self._on_lost = on_lost
        self._on_refs = on_refs
        self._lock = make_lock("client_connection")
        self._ids = itertools.count(1)
        self._calls: PendingCalls[Waiter | FutureCall] = PendingCalls()
        self._given_up = 0  # abandoned calls whose answers may still arrive, with references and segments
        self._reader: Waiter | _LoopReads | None = None
        self._loop_in_stream = False  # the loop is reading from the stream right now
        self._followers: dict[Waiter, None] = {}  # sleeping callers, in the order in which they become reader
        self._wants_input = False
        self._wants_output = False
        self._hung_up = False
        self._most_outbox = settings.outbox_bytes
        self._most_in_flight = settings.in_flight_bytes
        self._may_wait = settings.when_full == "wait"
        self._room_waiters: dict[Waker, bool] = {}  # callers that wait for room, and whether they are nested
        self._deadline_timer: TimerHandle | None = None  # for the nearest deadline of the open calls
        self._is_probed = True  # a timer looks whether the other host still answers, or nothing needs to
        self._is_watched = False  # also while no calls are open
        self._uncork_due = False  # a timer will send the requests that wait for more
        self._lost: str | None = None
        self._to_fail: list[Waiter | FutureCall] = []  # calls that were open when the connection was lost
        self._spinner = Spinner()
        self._poller = select.poll()  # used by the reader
        self._shares_clock = False
        self._connection: Connection

    def attach(self, connection: Connection) -> None:
        self._connection = connection
        self._shares_clock = connection.shares_clock
        self._poller.register(connection.fd, select.POLLIN)
        self._is_probed = not connection.can_probe
        self._loop.add(connection.fd, HANGUP, self._on_events)

    def wrap(self, wrapped: Callable[[Any], Any]) -> None:
        """Replace the connection with a wrapper around it."""
        self._connection = wrapped(self._connection)

    @property
    def has_room(self) -> bool:
        """Whether a call would be sent without waiting for room in the outbox."""
        return self._connection.outbox_bytes <= self._most_outbox

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    @property
    def open_work(self) -> int:
        """As ``open_calls``, without farprop's own."""
        with self._lock:
            return sum(not _flags_of(call) & SYSTEM for _, call, _ in self._calls.all())

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
            self._loop.called_from_outside = True
        left = timeout
        if self._connection.outbox_bytes > self._most_outbox or self._calls.bytes > self._most_in_flight:
            left = self._wait_for_room(message, pooled, timeout)
        began = call.began = _now()
        call.timeout = left
        deadline = None if left is None else began + left
        # From here on Ctrl-C must leave nothing of this call behind.
        try:
            with self._lock:
                if self._lost is not None:
                    raise not_run(self._lost_error())
                self._calls.open(call_id, call, None, message.memory)
                if not self._is_probed:
                    self._probe_soon()
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
            _finish_with(call, waiter.outcome)
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
            self._threads.submit(_finish_with, call, waiter.outcome)
        self._hand_over(waiter)

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

    def call_async(self, message: Message, call: FutureCall) -> None:
        """Send a request; ``call.finish`` is called once with its outcome."""
        timeout = call.timeout
        call_id = message.call_id = next(self._ids)
        pooled = getattr(this_thread, "pool", None) is self._threads
        if not pooled:
            self._loop.called_from_outside = True
        left = timeout
        if self._connection.outbox_bytes > self._most_outbox or self._calls.bytes > self._most_in_flight:
            left = self._wait_for_room(message, pooled, timeout)
        began = _now()
        deadline = None if left is None else began + left
        me = _get_ident()
        serves = self._threads.serving.get(me) or coroutine_of.get()
        parent = None if serves is None else (serves.connection.peer, serves.call_id)
        name = message.name or getattr(message, "function_name", b"")
        call.origin = name, message.flags, message.autograd, began, me, parent
        try:
            with self._lock:
                if self._lost is not None:
                    raise not_run(self._lost_error())
                self._calls.open(call_id, call, deadline, message.memory)
                if not self._is_probed:
                    self._probe_soon()
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
            self._wake_for_room()
        self._watch_deadlines()
        for call in expired:
            if isinstance(call, FutureCall) and call.timeout is not None:
                self._fail(call, timeout_error(self.peer, call.timeout))

    def _probe_soon(self) -> None:
        """While calls are open, find out whether the other host has vanished. Called under the lock."""
        self._loop.call_at(_now() + PROBE_SECONDS, self._probe)
        self._is_probed = True

    def keep_probing(self) -> None:
        """Find out whether the other host has vanished although no calls are open."""
        with self._lock:
            self._is_watched = True
            if not self._is_probed and self._lost is None:
                self._probe_soon()

    def _probe(self) -> None:
        """Called by the loop."""
        with self._lock:
            if self._lost is not None or not (len(self._calls) or self._is_watched):
                self._is_probed = False
                return
        try:
            state = self._connection.probe()
        except ConnectionLostError as error:
            self.lose(str(error))
            return
        if state is HostState.VANISHED:
            self.lose("its host does not answer any more")
            return
        self._loop.call_at(_now() + PROBE_SECONDS, self._probe)

    def _uncork_soon(self) -> None:
        # Called after the request was queued, so a timer that has not run yet will send it.
        if self._uncork_due:
            return
        with self._lock:
            if not self._uncork_due:
                self._loop.call_at(_now() + _UNCORK_SECONDS, self._uncork)
                self._uncork_due = True

    def _uncork(self) -> None:
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
        try:
            self._connection.send(message, more)
            message.sent = True
        except ConnectionLostError as error:
            # The callee can't have read all of it.
            with self._lock:
                is_open = self._calls.answer(call_id) is not None
            self.lose(str(error))
            if is_open:
                not_run(error)
                raise
        except Exception:
            raise  # nothing was sent
        except BaseException as error:
            self.lose(f"sending to it was interrupted by {type(error).__name__}")  # half a message may have been sent
            raise

    def _wait_for_room(self, message: Message, pooled: bool, timeout: float | None) -> float | None:
        """Wait until a request may be sent, or raise if the settings say so; returns the seconds that are left.

        A nested call waits for nothing but the outbox, and farprop's own calls wait for nothing at all: the answers
        that would make room may depend on them.
        """
        if message.flags & SYSTEM:
            return timeout
        nested = pooled or getattr(this_thread, "runs_coroutines", False)
        if not nested and not self._may_wait:
            error = OverloadedError(
                f"A call to {self.peer} was not sent: calls of {self._calls.bytes} bytes have no answer yet, of which "
                f"{self._connection.outbox_bytes} bytes are not sent. The limits are FARPROP_IN_FLIGHT_BYTES="
                f"{self._most_in_flight} and FARPROP_OUTBOX_BYTES={self._most_outbox}. Wait for answers before you "
                "send more, or set FARPROP_WHEN_FULL=wait."
            )
            raise not_run(error)
        waker = Waker()
        deadline = None if timeout is None else _now() + timeout
        with self._threads.blocked():
            while True:
                with self._lock:
                    if self._lost is not None or self._has_room(nested):
                        break
                    self._room_waiters[waker] = nested
                # An interrupt of another thread may have lost the wake-up.
                left = _LOOK_SECONDS if deadline is None else deadline - _now()
                if left <= 0:
                    raise not_run(timeout_error(self.peer, cast(float, timeout)))
                waker.wait(timeout=min(_LOOK_SECONDS, left))
        return None if deadline is None else max(0.0, deadline - _now())

    def _has_room(self, nested: bool) -> bool:
        # Half of the limit, so that callers who wait are not woken for each answer.
        return self._connection.outbox_bytes <= self._most_outbox // 2 and (
            nested or self._calls.bytes <= self._most_in_flight // 2
        )

    def _wake_for_room(self) -> None:
        """Calls have ended, or bytes were sent: wake those who wait for that. Called under the lock."""
        for waker, nested in list(self._room_waiters.items()):
            if self._lost is not None or self._has_room(nested):
                waker.wake()
                del self._room_waiters[waker]

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
        left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, max(0.0, deadline - _now()))
        if not call.waker.wait(timeout=left):
            self._take_over(call)

    def _take_over(self, call: Waiter) -> None:
        """Nobody has woken this caller for a while: read if nobody reads. An interrupt may have lost the wake-up."""
        with self._lock:
            reader = self._reader
            if (reader is None or reader.has_left) and call.outcome is None and self._lost is None:
                self._followers.pop(call, None)
                self._join_readers(call, pooled=False)

    def _leave(self, call: Waiter, call_id: int, sent: bool = True) -> None:
        """The caller stops waiting. Its answer is dropped if it arrives later."""
        with self._lock:
            self._followers.pop(call, None)
            self._given_up += self._calls.answer(call_id) is not None and sent
            self._wake_for_room()
        self._hand_over(call)

    # Reading

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
        left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, max(0.0, deadline - began))
        events = poll(left * 1000)
        now = _now()
        self._spinner.slept(now - began)
        return bool(events) or deadline is None or now < deadline

    def _deliver(self, messages: list[Message], run: Callable[..., None]) -> None:
        answered: list[list[Any]] = []
        for message in messages:
            if message.kind == REQUEST:
                raise ProtocolError("a request where an answer should be")
            if message.flags & (REFS | RETURNS):
                # Also for answers to abandoned calls: their references are released, not leaked.
                self._on_refs(self.rank, message)
        try:
            with self._lock:
                for message in reversed(messages):
                    if message.kind != NOTICE:
                        pair: list[Any] = [None, message]
                        answered.append(pair)
                        # To store is not a call: an interrupt finds the call in the table or in the pair.
                        call = pair[0] = self._calls.answer(message.call_id)
                        if call is None and self._given_up:
                            self._given_up -= 1
                if self._room_waiters:
                    self._wake_for_room()
            while answered:
                self._deliver_one(answered[-1], run)
                answered.pop()
        except BaseException:
            # Ctrl-C: the answers of other callers have left the table, and must not get lost.
            for pair in answered:
                self._threads.submit(self._deliver_one, pair, self._threads.submit)
            raise

    def _deliver_one(self, pair: list[Any], run: Callable[..., None]) -> None:
        """Deliver an answer to its call. Delivering it twice does no harm."""
        if not pair:
            return
        call, message = pair
        _log.debug("%s: call %d is answered by %s (rank %d)", self._own_label, message.call_id, self.peer, self.rank)
        if call is None:
            if message.received_refs is not None:
                run(pair.clear)  # abandoned; this may drop the last reference to a user's object
        elif isinstance(call, Waiter):
            call.outcome = message
            if call is not self._reader:  # the reader is this thread
                self._wake(call)
        elif call.quick:
            call.finish(message, None)
        elif isinstance(call, AwaitedCall) and call.waiter is not None:
            self._tell_waiter(call, call.waiter, message)
            pair.clear()
        else:
            call = message = None
            run(_finish, pair)

    def _fail(self, call: FutureCall, error: Exception) -> None:
        """End a call that has left the table with an error."""
        if isinstance(call, AwaitedCall) and call.waiter is not None:
            self._tell_waiter(call, call.waiter, error)
        else:
            self._threads.submit(call.finish, None, error)

    def _tell_waiter(self, call: FutureCall, waiter: Waiter, outcome: Message | Exception) -> None:
        """Give the outcome to the thread that waits for a future."""
        waiter.outcome = outcome
        if waiter.has_left:  # see _stop_waiting_for
            self._threads.submit(_finish_with, call, outcome)
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
                if flushed or self._room_waiters:
                    with self._lock:
                        self._wake_for_room()
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

    # Ending

    def lose(self, reason: str) -> None:
        """The connection is lost: fail every open call."""
        with self._lock:
            if self._lost is not None:
                return
            self._followers.clear()
            self._to_fail = self._calls.lost()
            self._lost = reason
            self.lost = True
        self._end()

    def _end(self) -> None:
        """Do what follows from the loss. To do it again does no harm: an interrupt leaves the rest to the pool."""
        try:
            with self._lock:
                self._wake_for_room()
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
        return ConnectionLostError(
            f"Lost the connection to {self.peer}: {self._lost}. It has shut down or died, or the network is cut."
        )

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
