"""The epoll loop: what happens when a descriptor is ready or a time has come.

Rules that hold here:

- One thread at a time calls ``poll``. It calls the handlers and the timers' callbacks, which must not block.
- Everything else may be called by any thread, also while another one polls.
"""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable

from farprop.runtime.spinner import Activity, Events, Spinner
from farprop.runtime.timers import TimerHandle, TimerHeap

_log = logging.getLogger(__name__)

IN, OUT, HANGUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP

_now = time.monotonic

Handler = Callable[[int], None]


class EventLoop:
    """See the module's rules. ``on_pause()`` is called before the thread that polls goes to sleep."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.on_pause: Callable[[], None] = lambda: None
        # Whether the next ``poll`` may spin: a request came, or a thread of the pool waits for an answer. After other
        # events a thread of the program's is at work, and needs the core more than a thread that spins.
        self.may_spin = False
        # A thread of the program's made a call.
        self.called_from_outside = False
        self._epoll = select.epoll()
        wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wakeup: int | None = wakeup  # None once closed
        self._epoll.register(wakeup, IN)
        self._handlers: dict[int, Handler] = {wakeup: self._drain_wakeup}
        self._turn = 0  # how often events were polled
        self._timers = TimerHeap()
        self._spinner = Spinner()

    def add(self, fd: int, events: int, handler: Handler) -> None:
        """Have ``handler(mask)`` called when the descriptor is ready. Readiness is level-triggered."""
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        """Wait for other events of a descriptor."""
        try:
            self._epoll.modify(fd, events)
        except (OSError, ValueError):
            pass  # closed meanwhile

    def remove(self, fd: int) -> None:
        """Forget a descriptor, before it is closed. A second time does no harm."""
        if self._handlers.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):
                pass

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle:
        """Have ``callback()`` called by the thread that polls, at ``when`` of the monotonic clock, or soon after.

        Returns:
            A handle that can cancel it.
        """
        handle = self._timers.call_at(when, callback)
        if self._timers.next_deadline == when:
            self.wake()
        return handle

    def call_at_lockfree(self, when: float, callback: Callable[[], None]) -> None:
        """As ``call_at``, for the garbage collector: takes no lock."""
        self._timers.call_at_lockfree(when, callback)
        self.wake()

    def wake(self) -> None:
        """End the sleep of the thread that polls. Takes no lock."""
        wakeup = self._wakeup
        if wakeup is not None:
            try:
                os.eventfd_write(wakeup, 1)
            except OSError:
                pass

    def poll(self, timeout: float | None = None) -> None:
        """Wait until something is ready or due, for at most ``timeout`` seconds (None: no limit), and handle it."""
        poll = self._epoll.poll
        events: Events = []
        if self.may_spin and not self.called_from_outside:
            events = self._spinner.poll(poll, self.activity)
        self.may_spin = self.called_from_outside = False
        if not events:
            self.on_pause()
            began = _now()
            deadline = self._timers.next_deadline
            if deadline is not None:
                left = max(0.0, deadline - began)
                timeout = left if timeout is None else min(timeout, left)
            events = poll(timeout)
            self._spinner.slept(_now() - began)
        handlers = self._handlers
        turn = self._turn = self._turn + 1
        for fd, mask in events:
            if self._turn != turn:
                return  # the last handler had to wait, so another thread polls now, and gets the same events
            handler = handlers.get(fd)
            if handler is not None:
                try:
                    handler(mask)
                except Exception:
                    _log.exception("farprop: unexpected error while handling input")
                    self.remove(fd)
        deadline = self._timers.next_deadline
        if deadline is not None and deadline <= (now := _now()):
            self._timers.run_due(now)

    def _drain_wakeup(self, _: int) -> None:
        wakeup = self._wakeup
        if wakeup is not None:
            try:
                os.eventfd_read(wakeup)
            except OSError:
                pass
        self._timers.sort_in()

    def close(self) -> None:
        """Close the loop's own descriptors. Nobody may poll any more; also for a forked child."""
        self._handlers.clear()
        # The number first: the garbage collector may want to wake us at any moment, and it may be somebody's file by
        # then.
        wakeup, self._wakeup = self._wakeup, None
        self._epoll.close()
        if wakeup is not None:
            os.close(wakeup)
