"""Calls that somebody listens to, at both of their ends: what happened when, from the first look to the answer.

A record becomes an event when it is told, or later: on the path of a call it only takes the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from farprop.protocol.events import OK, UNFINISHED, ClientCall, ServedCall, message_of
from farprop.runtime.recorder import CallSpan, Tracer, recorder
from farprop.wire.function_names import shown_name
from farprop.wire.message import SYSTEM, TRACED, Message
from farprop.wire.trace_head import TraceHead

RPC_SYNC, RPC_ASYNC, REMOTE_CALL = "rpc_sync", "rpc_async", "remote"

_now = time.monotonic
_native_id = threading.get_native_id
# Functions that call a method of a referenced value, and which of their arguments is its name: that is what is told.
METHOD_AT = {b"farprop.rpc.rref_proxy:invoke_on_owner": 3, b"farprop.rpc.rref_proxy:invoke_here": 1}
_LONGEST_METHOD = 200
_BARRIERS = b"farprop.rpc.api:_"  # the functions that all-gathers call


def is_system(name: bytes, flags: int) -> bool:
    """Whether a call is farprop's own: those of barriers count as work of the program only for ``shutdown``."""
    return bool(flags & SYSTEM) or name.startswith(_BARRIERS)


def _method_of(name: bytes, args: Sequence[Any]) -> str | None:
    """The method that a call of this function calls in turn, if it is one of ``METHOD_AT``."""
    at = METHOD_AT.get(name)
    if at is None or at >= len(args) or not isinstance(args[at], str):
        return None
    return str(args[at][:_LONGEST_METHOD])


def name_of_method(name: bytes, args: Sequence[Any]) -> bytes:
    """How errors, logs and inspection name a call of one of ``METHOD_AT``: by the method, or if it has no name that a
    method can have, which is the caller's fault, by the function.
    """
    method = _method_of(name, args)
    return name if method is None or not method.isidentifier() else b":" + method.encode()


def called_name(message: Message) -> bytes:
    """How errors, logs and inspection name what a request calls."""
    return getattr(message, "function_name", b"") or message.name


def _end_span(span: CallSpan, caller: str, callee: str, number: int, outcome: str) -> None:
    try:
        span.end(caller, callee, number, outcome)
    except Exception:
        recorder.drop_tracer()


def _by(end: float, time: float) -> float:
    """A time of a record that is not there yet, or came after ``end``, is the end."""
    return time if 0.0 < time < end else end


class CallRecord:
    """A call of this worker that somebody listens to. It is told when it has ended.

    With ``decodes``, the answer is decoded after it was delivered: then ``end`` ends it, or leaving the record as a
    context manager. Otherwise its answer ends it. ``waits``: whether this thread waits for it.
    """

    __slots__ = (
        "_began",
        "_callee",
        "_context",
        "_decodes",
        "_encoded",
        "_ended",
        "_flags",
        "_kind",
        "_message",
        "_method",
        "_name",
        "_number",
        "_outcome",
        "_parent",
        "_received_bytes",
        "_sent_bytes",
        "_span",
        "_thread",
        "_told",
        "_waits",
        "answered",
        "sent",
    )

    def __init__(
        self,
        kind: str,
        began: float,
        message: Message,
        args: Sequence[Any] = (),
        decodes: bool = True,
        waits: bool = True,
    ) -> None:
        self._encoded = _now()
        self._kind = kind
        self._began = began
        self._name = message.name or getattr(message, "function_name", b"")
        self._method = _method_of(self._name, args) if self._name in METHOD_AT else None
        self._flags = message.flags
        self._context = None if message.autograd is None else message.autograd.context_id
        self._sent_bytes = message.nbytes
        self._decodes = decodes
        self._thread = _native_id()
        self._callee = ""
        self._number = 0
        self._parent: tuple[str, int] | None = None
        self._received_bytes = 0
        self._told = False
        self._waits = waits
        self._message = ""
        self.sent = self.answered = 0.0
        self._span: CallSpan | None = None
        tracer = recorder.tracer
        if tracer is not None and not is_system(self._name, self._flags):
            self._begin_span(tracer, message)

    def _begin_span(self, tracer: Tracer, message: Message) -> None:
        try:
            name = self._method or recorder.name_of(self._name)
            span = tracer.client_span(self._kind, name, self._began)
            head = TraceHead.parse(message.trace) if message.trace else TraceHead()
            head.carrier = span.carrier
            message.trace = head.pack()
            message.flags |= TRACED
            self._span = span
        except Exception:
            recorder.drop_tracer()

    def on_sending(self, callee: str, number: int, serves: Any) -> None:
        """It is sent next. ``serves`` is the ``PendingReply`` that this thread works on, or None."""
        self._callee, self._number = callee, number
        if serves is not None:
            self._parent = serves.connection.peer, serves.call_id

    def on_sent(self) -> None:
        """It was sent. Another thread may have its answer already."""
        self.sent = _now()

    def on_answer(self, answer: Message) -> None:
        self.answered = _now()
        self._received_bytes = answer.nbytes
        if not self._decodes:
            self.end(None)

    def on_error(self, error: BaseException) -> None:
        """It got no answer."""
        if not self._decodes:
            self.end(error)

    def end(self, error: BaseException | None) -> None:
        """It has ended, with this error or with its value. A second time does nothing."""
        was_sent = self.sent or self.answered
        span, self._span = self._span, None
        if span is not None:
            number = self._number if was_sent else 0
            _end_span(span, "", self._callee, number, OK if error is None else type(error).__name__)
        if self._told or not was_sent:
            return
        self._told = True
        self._ended = _now()
        self._outcome = OK if error is None else type(error).__name__
        if error is not None:
            self._message = message_of(error)
        recorder.record(self)

    def event(self) -> ClientCall:
        ended = self._ended
        sent = self.sent or self.answered
        return self._event(self._callee, self._number, sent, self.answered or ended, ended, self._outcome)

    def unfinished(self, callee: str, number: int, ended: float) -> ClientCall:
        """The event of a call that had no answer at this time. It may go on meanwhile."""
        sent, answered = _by(ended, self.sent), _by(ended, self.answered)
        return self._event(callee, number, sent, answered, ended, UNFINISHED)

    def _event(self, callee: str, number: int, sent: float, answered: float, ended: float, outcome: str) -> ClientCall:
        name = self._name
        return ClientCall(
            callee,
            number,
            self._method or recorder.name_of(name),
            shown_name(name) if len(name) == 1 else self._kind,
            self._thread,
            self._parent,
            self._context,
            self._began,
            self._encoded,
            sent,
            answered,
            ended,
            self._sent_bytes,
            self._received_bytes,
            outcome,
            is_system(name, self._flags),
            self._waits,
            self._message,
        )

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)


class ServedRecord:
    """A request that this worker runs, and that somebody listens to. It is told when its answer is sent."""

    __slots__ = (
        "_arrived",
        "_caller",
        "_carrier",
        "_ended",
        "_entered",
        "_flags",
        "_function",
        "_message",
        "_name",
        "_number",
        "_outcome",
        "_received_bytes",
        "_sent_bytes",
        "_span",
        "_started",
        "_thread",
        "context",
        "decoded",
        "is_answered_later",
        "returned",
    )

    def __init__(self, caller: str, message: Message, started: float) -> None:
        self._caller = caller
        self._number = message.call_id
        self._name = message.name
        self._function = ""  # made when it is needed
        self._thread = _native_id()
        self._arrived = getattr(message, "arrived", started)
        self._started = started
        self._received_bytes = message.nbytes
        self._flags = message.flags
        self.context = None if message.autograd is None else message.autograd.context_id
        self.decoded = self.returned = 0.0
        self._outcome = OK
        self._message = ""
        self.is_answered_later = False
        self._span: CallSpan | None = None
        self._entered: CallSpan | None = None
        self._carrier = message.trace if message.flags & TRACED and recorder.tracer is not None else b""

    def on_decoded(self, function: Any, args: Sequence[Any]) -> None:
        """The function runs now."""
        if not self._name:
            self._function = shown_name(b"", function)
        elif self._name in METHOD_AT:
            self._function = _method_of(self._name, args) or ""
        self.decoded = _now()
        tracer = recorder.tracer
        if tracer is not None and not is_system(self._name, self._flags):
            self._begin_span(tracer)

    @property
    def _shown(self) -> str:
        return self._function or recorder.name_of(self._name)

    def _begin_span(self, tracer: Tracer) -> None:
        try:
            carrier = TraceHead.parse(self._carrier).carrier if self._carrier else {}
            self._span = self._entered = tracer.server_span(self._shown, carrier, self._arrived)
        except Exception:
            recorder.drop_tracer()

    def on_returned(self) -> None:
        self.returned = _now()
        entered, self._entered = self._entered, None
        if entered is not None:  # the span itself has ended already if the function raised
            try:
                entered.leave()
            except Exception:
                recorder.drop_tracer()

    def on_error(self, error: BaseException) -> None:
        """Its answer will be this error."""
        self._outcome = type(error).__name__
        self._message = message_of(error)

    def end(self, answer: Message) -> None:
        """The answer was sent."""
        self._ended = _now()
        self._sent_bytes = answer.nbytes
        span, self._span = self._span, None
        if span is not None:
            _end_span(span, self._caller, "", self._number, self._outcome)
        recorder.record(self)

    def event(self) -> ServedCall:
        decoded = self.decoded or self._ended
        return self._event(decoded, self.returned or decoded, self._ended, self._sent_bytes, self._outcome)

    def unfinished(self, ended: float) -> ServedCall:
        """The event of a request that was not answered at this time. It may go on meanwhile."""
        return self._event(_by(ended, self.decoded), _by(ended, self.returned), ended, 0, UNFINISHED)

    def _event(self, decoded: float, returned: float, ended: float, sent_bytes: int, outcome: str) -> ServedCall:
        return ServedCall(
            self._caller,
            self._number,
            self._shown,
            self._thread,
            self.context,
            self._arrived,
            self._started,
            decoded,
            returned,
            ended,
            self._received_bytes,
            sent_bytes,
            outcome,
            is_system(self._name, self._flags),
            self.is_answered_later,
            self._message,
        )
