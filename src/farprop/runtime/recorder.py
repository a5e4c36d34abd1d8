"""Takes the events of this process, and gives them to those who listen.

There is one recorder for the process, because process groups have events, too, and need no agent.

Rules that hold here:

- ``is_on`` is False while nobody listens. Code on the path of a call looks at it once, and then at what it has made
  itself, so a call that began before somebody listened is not told.
- Listeners are called on the thread that made the event. One that raises is removed.
- An interrupt may lose an event, and nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from farprop.locks import make_lock
from farprop.protocol.events import WAIT, Event, Span
from farprop.wire.function_names import shown_name

_log = logging.getLogger(__name__)

Listener = Callable[[Event], None]


class LateEvent(Protocol):
    """What an event is made of."""

    def event(self) -> Event:
        """Make it."""


LateListener = Callable[[LateEvent], None]

_now = time.monotonic
_native_id = threading.get_native_id
_get_ident = threading.get_ident
_MOST_NAMES = 10_000

A_FUTURE = "wait for a future"


class CallSpan(Protocol):
    """A call in a distributed trace, at one of its ends."""

    carrier: dict[str, str]
    """What the callee needs to know of the trace; empty at the callee."""

    def leave(self) -> None:
        """At the callee: its function has returned, on the thread that the span was made on."""

    def end(self, caller: str, callee: str, number: int, outcome: str) -> None:
        """The call has ended. The name of this worker is empty; ``number`` is 0 if the call was not sent."""


class Tracer(Protocol):
    """Makes spans. Other than a listener, it is called when a call begins, on the thread that makes or serves it."""

    def client_span(self, kind: str, function: str, began: float) -> CallSpan:
        """This worker makes a call."""

    def server_span(self, function: str, carrier: dict[str, str], arrived: float) -> CallSpan:
        """This worker runs the function of a call now, until ``leave``."""


class Recorder:
    """See the module's rules. Methods may be called from any thread.

    ``tracer`` is there while calls are part of distributed traces. Whoever sets it also subscribes.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self.forget_all()

    def forget_all(self) -> None:
        """Nobody listens. For a forked child too: the lock may have been held, and the listeners are the parent's."""
        self.is_on = False
        self.tracer: Tracer | None = None
        self.waits: dict[int, tuple[str, float]] = {}  # by thread, for what it waits now, and since when
        self._listeners: tuple[Listener, ...] = ()
        self._late_listeners: tuple[LateListener, ...] = ()
        self._lock = make_lock("recorder")

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` with every event from now on; returns the function that ends this.

        The listener must only take note: it takes no lock that is held during calls, and waits for nothing.
        """

        with self._lock:
            self._listeners = (*self._listeners, listener)
            self.is_on = True
        return partial(self._remove, listener)

    def subscribe_late(self, listener: LateListener) -> Callable[[], None]:
        """As ``subscribe``, for who reads events later: calls are not slowed down by making them.

        ``listener`` is called with what events are made of. Their ``event`` makes them.
        """
        with self._lock:
            self._late_listeners = (*self._late_listeners, listener)
            self.is_on = True
        return partial(self._remove, listener)

    def _remove(self, listener: Listener | LateListener) -> None:
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other is not listener)
            self._late_listeners = tuple(other for other in self._late_listeners if other is not listener)
            self.is_on = bool(self._listeners or self._late_listeners)
            if not self.is_on:
                self.waits.clear()  # an interrupt may have left some

    def record(self, record: LateEvent) -> None:
        """Something has ended: tell who listens."""
        listener: Listener | LateListener
        for listener in self._late_listeners:
            try:
                listener(record)
            except Exception:
                self._on_error(listener)
        if self._listeners:
            event = record.event()
            for listener in self._listeners:
                try:
                    listener(event)
                except Exception:
                    self._on_error(listener)

    def _on_error(self, listener: Listener | LateListener) -> None:
        _log.exception("farprop: a listener to events failed, and gets no more of them")
        self._remove(listener)

    def drop_tracer(self) -> None:
        """The tracer has failed in this ``except`` clause: go on without it."""
        _log.exception("farprop: a tracer of calls failed, and gets no more of them")
        self.tracer = None

    def span(self, category: str, name: str, began: float, **details: Any) -> None:
        """Record something that began at ``began`` on this thread, and has ended now."""
        self.record(_SpanRecord(Span(category, name, _native_id(), began, _now(), details)))

    def begin_wait(self, name: str) -> float:
        """This thread waits from now on; returns the time, for ``end_wait``."""
        began = _now()
        self.waits[_get_ident()] = name, began
        return began

    def end_wait(self, name: str, began: float) -> None:
        self.waits.pop(_get_ident(), None)
        self.span(WAIT, name, began)

    def name_of(self, name: bytes, function: Any = None) -> str:
        """As ``shown_name``, remembered for functions that have a name."""
        shown = self._names.get(name)
        if shown is None:
            shown = shown_name(name, function).removeprefix(":")
            if name and len(self._names) < _MOST_NAMES:
                self._names[name] = shown
        return shown


class _SpanRecord:
    """A span, which is made at once: there are few of them."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def event(self) -> Event:
        return self._span


recorder = Recorder()
os.register_at_fork(after_in_child=recorder.forget_all)
