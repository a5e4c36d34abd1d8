"""Our side of a connection that we dialled: requests go out, answers come in.

Who reads the answers: nobody, one waiting caller, or the loop. Rules that hold here:

- Reading changes hands only under ``_lock``, and only one party reads at a time.
- While calls are open, or answers to calls that were given up may still come, somebody reads; else nobody does, and
  the loop watches for hang-up alone.
- User code (callbacks of futures) runs on threads of the pool, never on a caller that reads for itself.
"""

from __future__ import annotations

import itertools
import logging
import select
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from farprop.errors import ConnectionLostError, InjectedFaultError, ProtocolError, RpcTimeoutError, UsageError
from farprop.protocol.calls import CallTable
from farprop.runtime.loop import HANGUP, IN, OUT, SPIN, Loop, Spinner
from farprop.transport.connection import Connection
from farprop.wire.codec import Encoded
from farprop.wire.frames import FORKS, NOTICE, REQUEST, SYSTEM, Frame

_log = logging.getLogger("farprop.links")

_now = time.monotonic
_perf = time.perf_counter
# A caller that has this much waiting in front of it waits, up to its deadline, before it adds more.
_OUTBOX_LIMIT = 256 << 20
# With more open calls than this, small requests wait for each other, but no longer than that.
_PIPELINED = 16
_UNCORK_SECONDS = 0.001


class SyncCall:
    """A caller that waits. ``bell`` rings when its answer is there, or when it is its turn to read."""

    __slots__ = ("bell", "error", "frame", "leads")

    def __init__(self) -> None:
        self.leads = False  # its thread polls for the loop, and does not hear the bell
        self.frame: Frame | None = None
        self.error: Exception | None = None
        self.bell = threading.Lock()
        self.bell.acquire()

    def done(self) -> bool:
        return self.frame is not None or self.error is not None

    def ring(self) -> None:
        try:
            self.bell.release()
        except RuntimeError:
            pass  # rung already: a turn to read and the answer came together


class FutureCall:
    """A call that nobody waits for here: ``finish`` is called once with its outcome, on a thread of the pool; or by
    whoever reads the answer, if it is ``quick``: farprop's own business, which runs nothing of a user's and is short.
    """

    __slots__ = ("timeout",)

    quick = False

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        raise NotImplementedError


class _LoopReads:
    """The value of ``_reader`` when the loop reads."""


_LOOP = _LoopReads()


def timeout_error(peer: str, timeout: float) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms) without an answer from {peer}. It may still be "
        "running there. Pass a larger timeout to the call, or 0 for none."
    )


_E = TypeVar("_E", bound=Exception)


def _unsent(error: _E) -> _E:
    error.unsent = True  # type: ignore[attr-defined]
    return error


def was_sent(error: BaseException) -> bool:
    """Whether a call that ended with this error may have been sent."""
    return not isinstance(error, InjectedFaultError | UsageError) and not hasattr(error, "unsent")


def _finish(pair: list[Any]) -> None:
    # Who read the answer still has the list, and must not be the last one to have what is a user's in the call: a
    # finaliser that makes a call would wait for the one that reads.
    if pair:
        call, frame = pair
        pair.clear()
        call.finish(frame, None)


class Link:
    """See the module's rules."""

    def __init__(
        self,
        loop: Loop,
        peer: str,
        rank: int,
        on_lost: Callable[[Link, str], None],
        on_forks: Callable[[int, Frame], Any],
    ) -> None:
        self.peer = peer
        self.rank = rank
        self.lost = False
        self.sent = 0
        self._loop = loop
        self._on_lost = on_lost
        self._on_forks = on_forks
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._calls: CallTable[SyncCall | FutureCall] = CallTable()
        self._given_up = 0  # calls whose answers may still come: they may bring references, and memory to give back
        self._reader: SyncCall | _LoopReads | None = None
        self._loop_in_stream = False  # the loop reads this very moment
        self._followers: dict[SyncCall, None] = {}  # callers that wait while somebody else reads, in order
        self._wants_input = False
        self._wants_output = False
        self._hung_up = False
        self._uncork_due = False  # an alarm is set for requests that wait for more
        self._lost: str | None = None
        self._spinner = Spinner()
        self._poller = select.poll()  # used by whoever reads
        self._connection: Connection

    def attach(self, connection: Connection) -> None:
        self._connection = connection
        self._poller.register(connection.fd, select.POLLIN)
        self._loop.add(connection.fd, HANGUP, self._on_events)

    def wrap(self, wrapped: Callable[[Any], Any]) -> None:
        """Put something between this and its connection."""
        self._connection = wrapped(self._connection)

    @property
    def has_room(self) -> bool:
        """Whether a call would be sent without waiting for room first."""
        return self._connection.outbox_bytes <= _OUTBOX_LIMIT

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    # Calls

    def call_sync(
        self, flags: int, name: bytes, encoded: Encoded, timeout: float, meanwhile: Callable[[], None] | None = None
    ) -> Frame:
        """Send a request and wait for its answer. ``timeout`` 0 is for ever. ``meanwhile`` is called as soon as it is
        sent, and should be short.
        """
        call = SyncCall()
        call_id = next(self._ids)
        loop = self._loop
        pooled = loop.on_pool_thread()
        if not pooled:
            loop.called_from_outside = True
        if self._connection.outbox_bytes > _OUTBOX_LIMIT:
            self._wait_for_room(timeout)
        deadline = _now() + timeout if timeout else 0.0
        # From here on Ctrl-C may come at any line, and must leave nothing of this call behind.
        try:
            with self._lock:
                if self._lost is not None:
                    raise _unsent(self._lost_error())
                self._calls.open(call_id, call, 0.0)
                if self._reader is not None and (self._reader is not _LOOP or self._loop_in_stream or pooled):
                    self._followers[call] = None
                elif pooled and loop.holds_baton():
                    self._loop_reads()
                else:
                    # Also in the place of the loop: to wake it for the answer and then us would take much longer.
                    self._reader = call
                    if self._wants_input:
                        self._wants_input = False
                        self._set_events()
                self.sent += not flags & SYSTEM
            self._send(flags, call_id, timeout, name, encoded)
            if meanwhile is not None:
                meanwhile()
            while not call.done():
                if not pooled:
                    self._await_answer(call, deadline)
                elif self._reader is _LOOP and loop.holds_baton():
                    # Another caller may take the reading over, bring our answer, or make it our turn to read.
                    call.leads = True
                    ended = loop.lead_until(lambda: call.done() or self._reader is call, deadline)
                    call.leads = False
                    if not ended:
                        loop.step_aside()
                else:
                    with loop.blocked():
                        self._await_answer(call, deadline)
                if deadline and not call.done() and _now() >= deadline:
                    break
        finally:
            if not call.done() or self._reader is call or call in self._followers:
                self._leave(call, call_id)
        if call.frame is not None:
            return call.frame
        if call.error is not None:
            raise call.error
        raise timeout_error(self.peer, timeout)

    def call_async(self, flags: int, name: bytes, encoded: Encoded, call: FutureCall) -> None:
        """Send a request; ``call.finish`` is called once with its outcome."""
        timeout = call.timeout
        call_id = next(self._ids)
        if self._connection.outbox_bytes > _OUTBOX_LIMIT:
            self._wait_for_room(timeout)
        deadline = _now() + timeout if timeout else 0.0
        with self._lock:
            if self._lost is not None:
                raise _unsent(self._lost_error())
            nearest = self._calls.open(call_id, call, deadline)
            if self._reader is None:
                self._loop_reads()
            self.sent += not flags & SYSTEM
            # With many calls on their way, small requests go out together; the loop sees to the last ones.
            more = len(self._calls) > _PIPELINED
        if nearest:
            self._loop.set_alarm(deadline)
        try:
            self._send(flags, call_id, timeout, name, encoded, more)
            if more:
                self._uncork_soon()
        except BaseException as error:
            with self._lock:
                ours = self._calls.answer(call_id) is not None
            if ours or not isinstance(error, ConnectionLostError):
                raise
            # else the call has ended already, with this very error

    def expire(self, now: float) -> float:
        """End the futures whose time is up, and send what waits for more; when to look again (0: not)."""
        with self._lock:
            uncork, self._uncork_due = self._uncork_due, False
            expired = self._calls.expire(now)
            self._given_up += len(expired)
            following = self._calls.next_deadline()
        for call in expired:
            if isinstance(call, FutureCall):
                self._loop.submit(call.finish, None, timeout_error(self.peer, call.timeout))
        if uncork:
            self._uncork()
        return following

    def _uncork_soon(self) -> None:
        # Called after the request has joined those that wait, so an alarm that has not rung yet will see it.
        if self._uncork_due:
            return
        with self._lock:
            self._uncork_due = True
        self._loop.set_alarm(_now() + _UNCORK_SECONDS)

    def _uncork(self) -> None:
        try:
            self._connection.uncork()
        except ConnectionLostError as error:
            self.lose(str(error))

    def _send(
        self, flags: int, call_id: int, timeout: float, name: bytes, encoded: Encoded, more: bool = False
    ) -> None:
        try:
            self._connection.send(REQUEST, flags, call_id, timeout, name, encoded, more)
        except ConnectionLostError as error:
            self.lose(str(error))
            raise
        except KeyboardInterrupt:
            self.lose("sending to it was interrupted")  # half a frame may be out
            raise

    def _wait_for_room(self, timeout: float) -> None:
        poller = select.poll()
        poller.register(self._connection.fd, select.POLLOUT)
        end = _now() + timeout
        while self._connection.outbox_bytes > _OUTBOX_LIMIT and not self._connection.closed:
            if timeout and _now() > end:
                raise _unsent(timeout_error(self.peer, timeout))
            with self._loop.blocked():
                poller.poll(20)

    def _await_answer(self, call: SyncCall, deadline: float) -> None:
        """Read if it is our turn, else sleep until somebody has read our answer or made it our turn."""
        if self._reader is call:
            self._read_for(call, deadline)
        elif deadline:
            call.bell.acquire(timeout=max(0.0, deadline - _now()))
        else:
            call.bell.acquire()

    def _leave(self, call: SyncCall, call_id: int) -> None:
        """The caller stops waiting: an answer that comes later finds nobody."""
        with self._lock:
            self._given_up += self._calls.answer(call_id) is not None
            self._followers.pop(call, None)
            reading = self._reader is call
        if reading:
            self._hand_over()

    # Reading

    def _read_for(self, call: SyncCall, deadline: float) -> None:
        """Read answers until ours is there or the time is up, then hand the reading on."""
        in_stream = False
        try:
            while not call.done() and self._input_comes(deadline):
                in_stream = True
                try:
                    frames = self._connection.receive()
                except BlockingIOError:
                    continue
                if frames is None:
                    self.lose("it closed the connection")
                    return
                self._deliver(frames, self._loop.submit)
                in_stream = False
        except ProtocolError as error:
            self.lose(f"it broke the protocol: {error}")
        except BaseException as error:
            # Ctrl-C or an error between the bytes and those they are for: the stream can't be trusted any more.
            if in_stream:
                self.lose(f"reading from it was interrupted by {type(error).__name__}")
            raise
        finally:
            self._hand_over()

    def _input_comes(self, deadline: float) -> bool:
        """Wait until there is something to read; False at the deadline. Being interrupted here does no harm."""
        poll = self._poller.poll
        spinner = self._spinner
        if spinner.worth_it():
            end = _perf() + SPIN
            while not poll(0):
                if _perf() > end:
                    spinner.failed()
                    break
            else:
                spinner.paid_off()
                return True
        if not deadline:
            poll()
            return True
        return bool(poll(max(0.0, deadline - _now()) * 1000)) or _now() < deadline

    def _deliver(self, frames: list[Frame], run: Callable[..., None]) -> None:
        for frame in frames:
            if frame.kind == REQUEST:
                raise ProtocolError("a request where an answer should be")
            if frame.flags & FORKS:
                # Also of an answer that nobody waits for any more: what came with it is dropped, not lost.
                self._on_forks(self.rank, frame)
        with self._lock:
            answered: list[list[Any]] = [
                [self._calls.answer(f.call_id), f] for f in reversed(frames) if f.kind != NOTICE
            ]
            if self._given_up:
                self._given_up = max(0, self._given_up - sum(call is None for call, _ in answered))
        try:
            while answered:
                self._deliver_one(answered[-1], run)
                answered.pop()
        except BaseException:
            # Ctrl-C: the others' answers are in no table any more, and must not get lost.
            for pair in answered:
                self._loop.submit(self._deliver_one, pair, self._loop.submit)
            raise

    def _deliver_one(self, pair: list[Any], run: Callable[..., None]) -> None:
        """Delivering it twice does no harm, not delivering it would."""
        if not pair:
            return
        call, frame = pair
        if call is None:
            if frame.arrivals is not None:
                run(pair.clear)  # too late; what came with it may be the last to hold a user's value
        elif isinstance(call, SyncCall):
            call.frame = frame
            self._ring(call)
        elif call.quick:
            call.finish(frame, None)
        else:
            call = frame = None
            run(_finish, pair)

    def _ring(self, call: SyncCall) -> None:
        call.ring()
        if call.leads and not self._loop.holds_baton():
            self._loop.wake()

    def _hand_over(self) -> None:
        """Whoever read is done: the next caller, the loop, or nobody reads from now on."""
        with self._lock:
            self._reader = None
            while self._followers:
                follower = next(iter(self._followers))
                del self._followers[follower]
                if not follower.done():
                    self._reader = follower
                    self._ring(follower)
                    return
            if self._lost is not None:
                return
            if self._hung_up:
                # Answers may be left in front of the end: the loop reads up to it.
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
            return  # the descriptor is not ours any more, or not the loop's for now
        events = HANGUP | (IN if self._wants_input else 0) | (OUT if self._wants_output else 0)
        self._loop.change(self._connection.fd, events)

    def want_output(self, _: Connection) -> None:
        """The connection's outbox has something in it."""
        with self._lock:
            self._wants_output = True
            if self._lost is None:
                self._set_events()

    def _on_events(self, mask: int) -> None:
        """Called by the loop."""
        if mask & OUT:
            try:
                if self._connection.flush():
                    with self._lock:
                        if not self._connection.outbox_bytes:
                            self._wants_output = False
                            self._set_events()
            except ConnectionLostError as error:
                self.lose(str(error))
                return
        if mask & ~OUT == 0:
            return
        with self._lock:
            if self._reader is not _LOOP and not mask & ~(IN | OUT):
                return  # a caller has taken the reading over after the loop had seen that there is something
            if self._reader is None:
                self._reader = _LOOP  # hang-up: read what is left, then the end
            elif self._reader is not _LOOP:
                # A caller reads and will find the end itself. Level-triggered hang-up would keep us busy until then.
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
            frames = self._connection.receive()
            if frames is None:
                self.lose("it closed the connection")
                return
            self._deliver(frames, self._loop.push_answer)
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
        """The connection is gone: every open call fails now."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = reason
            self.lost = True
            calls = self._calls.lost()
            self._followers.clear()
        self._loop.remove(self._connection.fd)
        self._connection.close()
        self._on_lost(self, reason)
        for call in calls:
            error = self._lost_error()
            if isinstance(call, SyncCall):
                call.error = error
                self._ring(call)
            else:
                self._loop.submit(call.finish, None, error)

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
