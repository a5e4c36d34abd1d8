"""The epoll loop and the threads around it. One thread at a time holds the baton: the right to wait for input.

Rules that hold here:

- The holder runs what it reads itself. If that takes long, the watcher gives the baton to another thread.
- At most ``limit`` requests run at once; threads that wait inside farprop don't count.
- Answers to our own calls are never held up by that limit.
- All fields under ``_lock`` are changed under it. Nobody waits for anything while holding it.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("farprop.loop")

STALL = 0.001  # seconds after which the watcher takes the baton from a thread that runs something
_WATCH_TICKS = 20  # ticks without anything running after which the watcher goes to sleep
_MOST_ANSWERING = 32  # threads that run callbacks of futures at once
_MOST_THREADS = 2000
_REST = 5.0  # seconds after which an idle thread that is one too many ends
SPIN = 400e-6  # seconds to poll before sleeping

IN, OUT, HANGUP = select.EPOLLIN, select.EPOLLOUT, select.EPOLLRDHUP

_get_ident = threading.get_ident
_now = time.monotonic
_perf = time.perf_counter

Handler = Callable[[int], None]
Task = tuple[Callable[..., None], tuple[Any, ...]]


class Spinner:
    """Decides whether polling before sleeping is worth it, from how it went lately."""

    __slots__ = ("_score", "_skipped")

    def __init__(self) -> None:
        self._score = 4 if len(os.sched_getaffinity(0)) > 1 else -(1 << 30)
        self._skipped = 0

    def worth_it(self) -> bool:
        if self._score > 0:
            return True
        self._skipped += 1
        if self._skipped >= 32 and self._score > -1000:
            self._skipped = 0
            return True
        return False

    def paid_off(self) -> None:
        if self._score < 8:
            self._score = max(self._score + 1, 2)

    def failed(self) -> None:
        if self._score > 0:
            self._score -= 1


class Loop:
    """See the module's rules. Handlers are called by the holder with the events of their descriptor; they must not
    block.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wakeup, IN)
        self._handlers: dict[int, Handler] = {self._wakeup: self._drain_wakeup}
        self._answers: deque[Task] = deque()  # completions of our own calls, and farprop's own chores
        self._requests: deque[Task] = deque()  # others' calls, under the limit
        self._running = 0
        self._answering = 0  # threads that deliver answers, and with them run callbacks, and don't wait
        self._delivering = 0  # the same with those that wait
        self._holder = 0
        self._running_since = 0.0  # when the holder began to run something; 0 if it did not
        self._idle: dict[int, threading.Lock] = {}
        self._threads: set[threading.Thread] = set()
        self._alarm = 0.0
        self._on_alarm: Callable[[float], float] = lambda now: 0.0
        self._on_pause: Callable[[], None] = lambda: None
        self._closed = False
        self._spinner = Spinner()
        self.called_from_outside = False
        self._watcher_bell = threading.Lock()
        self._watcher_bell.acquire()
        self._watching = False
        self.home: Any = None  # whose loop this is; for functions that are called by name on its threads

    def start(self, on_alarm: Callable[[float], float], on_pause: Callable[[], None]) -> None:
        """``on_alarm(now)`` is called when an alarm is due and returns when to be called next (0: not).

        ``on_pause()`` is called before the holder sleeps, and when it turned out to run something slow.
        """
        self._on_alarm = on_alarm
        self._on_pause = on_pause
        watcher = threading.Thread(target=self._watch, name=f"farprop-watcher-{self._name}", daemon=True)
        self._threads.add(watcher)
        watcher.start()
        with self._lock:
            self._spawn(with_baton=True)

    # Descriptors. epoll_ctl may be called by any thread while another one waits.

    def add(self, fd: int, events: int, handler: Handler) -> None:
        self._handlers[fd] = handler
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        try:
            self._epoll.modify(fd, events)
        except (OSError, ValueError):
            pass  # closed meanwhile

    def remove(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            try:
                self._epoll.unregister(fd)
            except (OSError, ValueError):
                pass

    # Work

    def push_request(self, function: Callable[..., None], *args: Any) -> None:
        """Queue a request. Called by handlers, that is by the thread that will look at the queue next."""
        self._requests.append((function, args))

    def submit_request(self, function: Callable[..., None], *args: Any) -> None:
        """Queue a request from any thread."""
        self._requests.append((function, args))
        self._recruit()

    def push_answer(self, function: Callable[..., None], *args: Any) -> None:
        """Queue something that the limit must not hold up. Called by handlers."""
        self._answers.append((function, args))

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run something on a thread of the pool, from any thread; at the latest while the loop closes."""
        self._answers.append((function, args))
        self._recruit()
        if self._closed:
            self._run_last()

    def set_alarm(self, when: float) -> None:
        """See that ``on_alarm`` is called at ``when`` or before."""
        with self._lock:
            if self._alarm and self._alarm <= when:
                return
            self._alarm = when
        self.wake()

    def nudge(self, when: float) -> None:
        """As ``set_alarm``, for the garbage collector, which may take no lock: an alarm that is set at the same moment
        may be some milliseconds late.
        """
        if not self._alarm or self._alarm > when:
            self._alarm = when
        self.wake()

    def wake(self) -> None:
        if self._wakeup >= 0:
            try:
                os.eventfd_write(self._wakeup, 1)
            except OSError:
                pass

    @property
    def delivers(self) -> bool:
        """Answers are on their way to futures and their callbacks."""
        return bool(self._answers or self._delivering)

    @property
    def requests_wait(self) -> bool:
        return bool(self._requests)

    # Waiting inside the pool

    def holds_baton(self) -> bool:
        return self._holder == _get_ident()

    def on_pool_thread(self) -> bool:
        return getattr(_pool, "loop", None) is self

    def lead_until(self, done: Callable[[], bool], deadline: float) -> bool:
        """The holder waits for something that a handler will bring: it goes on polling, and leaves all work to others.

        True if it is done; False at the deadline, or if the loop is closing.
        """
        me = _get_ident()
        with self._lock:
            self._running -= _pool.counted
            self._answering -= _pool.answering
            if self._holder == me:
                self._running_since = 0.0
        try:
            while not done():
                if self._closed or self._holder != me:
                    return False
                if self._requests or self._answers:
                    self._recruit()
                timeout = -1.0
                if deadline:
                    timeout = deadline - _now()
                    if timeout <= 0:
                        return False
                self._poll(timeout)
            return True
        finally:
            with self._lock:
                self._running += _pool.counted
                self._answering += _pool.answering
                self._watch_holder(me)

    def blocked(self) -> Blocked:
        """``with loop.blocked():`` around a wait on a pool thread, so that its place is free for others."""
        return Blocked(self)

    def step_aside(self) -> None:
        """The holder is about to wait, or to run something known to be slow: another thread takes the baton."""
        with self._lock:
            if self._holder == _get_ident():
                self._pass_baton()

    def _recruit(self) -> None:
        """Have some thread other than the holder run what is queued."""
        with self._lock:
            if self._closed:
                return
            if self._holder == 0:
                self._pass_baton()
            elif self._idle:
                _, bell = self._idle.popitem()
                bell.release()
            elif len(self._threads) < _MOST_THREADS and (
                (self._answers and self._answering < _MOST_ANSWERING) or self._running < self._limit
            ):
                self._spawn(with_baton=False)

    # Threads

    def _spawn(self, with_baton: bool) -> None:
        ready = threading.Lock()
        ready.acquire()
        thread = threading.Thread(target=self._thread_main, args=(ready,), name=f"farprop-{self._name}", daemon=True)
        self._threads.add(thread)
        thread.start()
        if with_baton:
            assert thread.ident is not None
            self._holder = thread.ident
        ready.release()

    def _thread_main(self, ready: threading.Lock) -> None:
        _pool.loop = self
        _pool.counted = _pool.answering = 0
        me = _get_ident()
        ready.acquire()
        try:
            while not self._closed:
                if self._holder == me:
                    self._lead(me)
                elif not self._run_queued(me) and not self._rest(me):
                    return
        finally:
            _pool.loop = None
            with self._lock:
                self._threads.discard(threading.current_thread())
                if self._holder == me and not self._closed:
                    self._pass_baton()

    def _lead(self, me: int) -> None:
        while self._holder == me and not self._closed:
            if not self._run_queued(me):
                self._poll(-1.0)

    def _run_queued(self, me: int) -> bool:
        """Run something from the queues; False if there was nothing that may run now."""
        if self._answers:
            self._run_answers(me)
            return True
        if not self._requests or self._running >= self._limit:
            return False
        try:
            function, args = self._requests.popleft()
        except IndexError:
            return True  # another thread was faster
        with self._lock:
            self._running += 1
            self._watch_holder(me)
        _pool.counted = 1
        try:
            function(*args)
        except Exception:
            _log.exception("farprop: unexpected error in a pool thread")
        finally:
            # What was called may hold tensors: it must not outlive the call in this frame.
            function = args = None  # type: ignore[assignment]
            with self._lock:
                self._running -= 1
                if self._holder == me:
                    self._running_since = 0.0
        return True

    def _run_answers(self, me: int) -> None:
        """Run what the limit does not hold up, one after the other; other threads may take from the queue meanwhile."""
        answers, lock = self._answers, self._lock
        _pool.counted = 0
        while True:
            try:
                function, args = answers.popleft()
            except IndexError:
                break
            with lock:
                self._answering += 1
                self._delivering += 1
                self._watch_holder(me)
            _pool.answering = 1
            try:
                function(*args)
            except Exception:
                _log.exception("farprop: unexpected error in a pool thread")
            function = args = None  # type: ignore[assignment]
            _pool.answering = 0
            with lock:
                self._answering -= 1
                self._delivering -= 1
        with lock:
            if self._holder == me:
                self._running_since = 0.0

    def _watch_holder(self, me: int) -> None:
        """The holder begins to run something: from now on the watcher looks at the time. Called under the lock."""
        if self._holder == me:
            self._running_since = _now()
            if not self._watching:
                self._watching = True
                self._watcher_bell.release()

    def _rest(self, me: int) -> bool:
        """Sleep until there is something to do; False if this thread should end."""
        bell = threading.Lock()
        bell.acquire()
        with self._lock:
            if self._closed:
                return False
            if self._holder == me or self._answers or (self._requests and self._running < self._limit):
                return True
            self._idle[me] = bell
        if bell.acquire(timeout=_REST):
            return not self._closed
        with self._lock:
            if self._idle.pop(me, None) is None:
                return not self._closed  # woken at the last moment
            return len(self._threads) <= self._limit

    def _pass_baton(self) -> None:
        """Give the baton to an idle or new thread. Called under the lock."""
        self._running_since = 0.0
        if self._closed:
            self._holder = 0
        elif self._idle:
            ident, bell = self._idle.popitem()
            self._holder = ident
            bell.release()
        else:
            self._spawn(with_baton=True)

    # Polling

    def _poll(self, timeout: float) -> None:
        poll = self._epoll.poll
        events: list[tuple[int, int]] = []
        if self.called_from_outside:
            # A thread of the program's makes calls: it needs the interpreter's lock more than we do.
            self.called_from_outside = False
        elif self._spinner.worth_it():
            end = _perf() + SPIN
            while True:
                events = poll(0)
                if events:
                    self._spinner.paid_off()
                    break
                if _perf() > end:
                    self._spinner.failed()
                    break
        if not events:
            self._on_pause()
            if self._alarm:
                left = max(0.0, self._alarm - _now())
                timeout = left if timeout < 0 else min(timeout, left)
            events = poll(None if timeout < 0 else timeout)
        handlers = self._handlers
        for fd, mask in events:
            handler = handlers.get(fd)
            if handler is not None:
                try:
                    handler(mask)
                except Exception:
                    _log.exception("farprop: unexpected error while handling input")
                    self.remove(fd)
        if self._alarm and self._alarm <= _now():
            self._ring_alarm()

    def _ring_alarm(self) -> None:
        with self._lock:
            self._alarm = 0.0
        following = self._on_alarm(_now())
        if following:
            with self._lock:
                if not self._alarm or following < self._alarm:
                    self._alarm = following

    def _drain_wakeup(self, _: int) -> None:
        try:
            os.eventfd_read(self._wakeup)
        except OSError:
            pass

    # Watching

    def _watch(self) -> None:
        bell = self._watcher_bell
        while True:
            bell.acquire()  # asleep: nothing runs
            quiet = 0
            while not self._closed:
                bell.acquire(timeout=STALL)
                stalled = False
                with self._lock:
                    since = self._running_since
                    if since:
                        quiet = 0
                        if _now() - since > STALL:
                            self._pass_baton()
                            stalled = True
                    else:
                        quiet += 1
                        if quiet > _WATCH_TICKS:
                            self._watching = False
                            break
                if stalled:
                    self._on_pause()
            if self._closed:
                return

    # Ending

    def close(self, timeout: float) -> None:
        """Stop polling and end the threads; those that still run something end when it does."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for bell in self._idle.values():
                bell.release()
            self._idle.clear()
            if not self._watching:
                self._watching = True
                self._watcher_bell.release()
        self.wake()
        deadline = _now() + timeout
        me = threading.current_thread()
        for thread in list(self._threads):
            if thread is not me:
                thread.join(max(0.0, deadline - _now()))
        if self._answers:
            # Futures that nobody completed. Their callbacks are user code, so we don't wait for them for ever.
            last = threading.Thread(target=self._run_last, name=f"farprop-{self._name}-last", daemon=True)
            last.start()
            last.join(max(0.1, deadline - _now()))
        self._requests.clear()
        self._handlers.clear()
        self._close_descriptors()

    def abandon(self) -> None:
        """In a forked child: the threads are not here, only the descriptors."""
        self._closed = True
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        # The number first: the garbage collector may want to wake us at any moment, and it may be somebody's file by
        # then.
        wakeup, self._wakeup = self._wakeup, -1
        self._epoll.close()
        os.close(wakeup)

    def _run_last(self) -> None:
        while True:
            try:
                function, args = self._answers.popleft()
            except IndexError:
                return
            try:
                function(*args)
            except Exception:
                _log.exception("farprop: unexpected error while shutting down")

    def facts(self) -> dict[str, int]:
        return {
            "threads": len(self._threads) - 1,
            "limit": self._limit,
            "idle": len(self._idle),
            "running": self._running,
            "queued": len(self._requests),
        }


class Blocked:
    __slots__ = ("_loop", "_pooled")

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._pooled = False

    def __enter__(self) -> None:
        loop = self._loop
        if getattr(_pool, "loop", None) is loop:
            self._pooled = True
            with loop._lock:
                loop._running -= _pool.counted
                loop._answering -= _pool.answering
                if loop._holder == _get_ident():
                    loop._pass_baton()
            if loop._requests:
                loop._recruit()

    def __exit__(self, *_: object) -> None:
        if self._pooled:
            with self._loop._lock:
                self._loop._running += _pool.counted
                self._loop._answering += _pool.answering


_pool = threading.local()


def loop_of_this_thread() -> Loop | None:
    """The loop whose pool this thread belongs to."""
    return getattr(_pool, "loop", None)
