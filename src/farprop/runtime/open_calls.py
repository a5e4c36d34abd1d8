"""The calls that have not ended, at both of their ends, as the events that they would be if they ended now.

A call that hangs is what whoever records a job looks for. Inspection knows all open calls, also those that were made
before anybody listened, so nothing is noted for this on the path of a call. What a record says is more exact.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from farprop.protocol.events import UNFINISHED, WAIT, ClientCall, Event, ServedCall, Span
from farprop.runtime.answer_reader import Waiter
from farprop.runtime.call_records import (
    REMOTE_CALL,
    RPC_ASYNC,
    RPC_SYNC,
    CallRecord,
    ServedRecord,
    called_name,
    is_system,
)
from farprop.runtime.future_call import AwaitedCall, FutureCall
from farprop.runtime.futures import Future
from farprop.runtime.peers import Peers
from farprop.runtime.python_threads import native_id_of
from farprop.runtime.recorder import A_FUTURE, recorder
from farprop.runtime.references.remote_call import RemoteCall
from farprop.runtime.request_queue import Request
from farprop.runtime.server import PendingReply, Server
from farprop.runtime.sync import awaited_by
from farprop.runtime.thread_pool import ThreadPool
from farprop.wire.function_names import shown_name
from farprop.wire.message import Message, Method

_MOST_CALLS = 1000  # of each connection, and of those that are queued
_RECORD = Method.RECORD.value  # the recording itself


@dataclass(frozen=True)
class _Made:
    callee: str
    number: int
    call: Waiter | FutureCall
    record: CallRecord | None
    serves: PendingReply | None
    """What the thread that waits for it runs."""


@dataclass(frozen=True)
class _Running:
    reply: PendingReply
    thread: int | None
    """The identity of the thread that runs it; None if its function has returned something that is not done."""

    @property
    def record(self) -> ServedRecord | None:
        return self.reply.served


@dataclass(frozen=True)
class _Queued:
    caller: str
    message: Message
    counted_from: float
    record = None


class OpenCalls:
    """What is open at one moment. Events are made of it later: there may be many.

    Args:
        peers: knows the calls of this worker.
        threads: knows the requests that it runs, and those that are queued.
        server: knows the other requests.
    """

    def __init__(self, peers: Peers, threads: ThreadPool, server: Server) -> None:
        self.left_out = 0
        """How many calls there are beyond those that are kept."""
        self._native_ids = {thread.ident: native_id_of(thread) for thread in threading.enumerate()}
        self._ends: list[_Made | _Running | _Queued] = []
        self._waits = dict(recorder.waits)
        serving = {ident: reply for ident, reply in list(threads.serving.items()) if reply is not None}
        for connection in list(peers.connections.values()):
            pending = connection.pending()
            self._keep([_made(connection.peer, number, call, serving) for number, call, _ in pending[:_MOST_CALLS]])
            self.left_out += len(pending[_MOST_CALLS:])
        self._note_early_waits()
        later = list(server.unfinished)
        self._ends += [_Running(reply, None) for reply in later]
        self._ends += [_Running(reply, ident) for ident, reply in serving.items() if reply not in set(later)]
        queued = [*server.held(), *threads.queued()]
        self._keep(map(_queued, queued[:_MOST_CALLS]))
        self.left_out += len(queued[_MOST_CALLS:])

    def _keep(self, ends: Iterable[_Made | _Queued | None]) -> None:
        self._ends += [end for end in ends if end is not None]

    def _note_early_waits(self) -> None:
        """Threads that have waited for the future of a call since before anybody listened."""
        awaited = [ident for ident, future in list(awaited_by.items()) if isinstance(future, Future)]
        calls = [end.call for end in self._ends if isinstance(end, _Made) and isinstance(end.call, AwaitedCall)]
        for ident in [*awaited, *(call.waiter.thread for call in calls if call.waiter is not None)]:
            self._waits.setdefault(ident, (A_FUTURE, 0.0))

    def events(self, began: float, ended: float, told: Iterable[object]) -> Iterator[Event]:
        """Make the events.

        Args:
            began: since when somebody listens. A call that came earlier and of which only that is known came then.
            ended: the time of the events' end.
            told: the records that were told meanwhile, because their calls have ended.
        """
        known = set(map(id, told))
        for end in self._ends:
            if end.record is not None and id(end.record) in known:
                continue
            if isinstance(end, _Made):
                event: Event | None = self._client_call(end, ended)
            elif isinstance(end, _Running):
                event = self._served_call(end, ended)
            else:
                event = _queued_call(end, began, ended)
            if event is not None:
                yield event
        for ident, (name, since) in self._waits.items():
            if ident in self._native_ids:
                yield Span(WAIT, name, self._native_ids[ident], max(since, began), ended, {"outcome": UNFINISHED})

    def _client_call(self, end: _Made, ended: float) -> ClientCall | None:
        call = end.call
        if end.record is not None:
            return end.record.unfinished(end.callee, end.number, ended)
        sent_bytes = 0
        parent: tuple[str, int] | None = None
        if isinstance(call, Waiter):
            if call.message is None:
                return None
            name = called_name(call.message)
            flags, head, began, thread = call.message.flags, call.message.autograd, call.began, call.thread
            sent_bytes = call.message.nbytes
            kind = RPC_SYNC
            if end.serves is not None:
                parent = end.serves.connection.peer, end.serves.call_id
        else:
            name, flags, head, began, thread, parent = call.origin
            kind = REMOTE_CALL if isinstance(call, RemoteCall) else RPC_ASYNC
        return ClientCall(
            end.callee,
            end.number,
            shown_name(name).removeprefix(":"),
            shown_name(name) if len(name) == 1 else kind,
            self._native_ids.get(thread, 0),
            parent,
            None if head is None else head.context_id,
            began,
            began,
            began,
            ended,
            ended,
            sent_bytes,
            0,
            UNFINISHED,
            is_system(name, flags),
            isinstance(call, Waiter),
        )

    def _served_call(self, end: _Running, ended: float) -> ServedCall | None:
        reply = end.reply
        if end.record is not None:
            return end.record.unfinished(ended)
        name, function, started, *_ = reply.run
        return ServedCall(
            reply.connection.peer,
            reply.call_id,
            shown_name(name, function).removeprefix(":"),
            0 if end.thread is None else self._native_ids.get(end.thread, 0),
            None if reply.context is None else reply.context.id,
            started,
            started,
            started,
            # It is not known when a function has returned that nobody listened to.
            started if end.thread is None else ended,
            ended,
            0,
            0,
            UNFINISHED,
            is_system(name, reply.flags),
            end.thread is None,
        )


def _made(callee: str, number: int, call: Waiter | FutureCall, serving: dict[int, PendingReply]) -> _Made | None:
    if isinstance(call, Waiter):
        message = call.message
        if message is None or message.name == _RECORD:
            return None
        return _Made(callee, number, call, message.record, serving.get(call.thread))
    # One without an origin is about to be sent.
    return _Made(callee, number, call, call.record, None) if hasattr(call, "origin") else None


def _queued(request: Request) -> _Queued | None:
    _, _, args = request
    if len(args) != 3 or not isinstance(args[1], Message):
        return None  # it continues one that has run before
    connection, message, counted_from = args
    return _Queued(connection.peer, message, counted_from)


def _queued_call(end: _Queued, began: float, ended: float) -> ServedCall:
    message = end.message
    arrived = getattr(message, "arrived", 0.0) or end.counted_from or began
    return ServedCall(
        end.caller,
        message.call_id,
        shown_name(message.name),
        0,
        None if message.autograd is None else message.autograd.context_id,
        min(arrived, ended),
        ended,
        ended,
        ended,
        ended,
        message.nbytes,
        0,
        UNFINISHED,
        is_system(message.name, message.flags),
    )
