"""The threads that poll the event loop and run what comes of it: the leader/followers pattern.

One thread, the leader, polls. It runs the requests that it reads itself, so no short call is handed from one thread to
another. Followers sleep, or run something. Rules that hold here:

- If what the leader runs takes long, the watcher makes another thread the leader.
- At most ``limit`` requests run at once; threads that wait inside farprop don't count. Callers take turns.
- Answers to our own calls are never held up by that limit.
- All fields are changed under ``_lock``, except the queues, whose ends are atomic. Nobody waits for anything, or calls
  anything of others, while holding it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from farprop.errors import UsageError
from farprop.locks import make_lock
from farprop.runtime.event_loop import EventLoop
from farprop.runtime.request_queue import LONG, Request, RequestQueue
from farprop.runtime.sync import OneShot, Waker

_log = logging.getLogger(__name__)

STALL = 0.001  # seconds after which a leader that runs something is replaced
_LONGEST_TICK = 0.005  # seconds between two looks of the watcher while nothing stalls
_WATCH_TICKS = 20  # ticks without anything running after which the watcher goes to sleep
_MAX_ANSWERING = 32  # threads that run callbacks of futures at once
_MAX_THREADS = 2000
_REST_SECONDS = 5.0  # after which an idle thread that is one too many ends

_get_ident = threading.get_ident
_now = time.monotonic
# OpenMP has a number of threads for each thread, and convolutions ask nobody else: a thread that has not asked torch
# yet would use all cores, whatever ``torch.set_num_threads`` was told. To ask takes 25 ns.
adopt_num_threads: Callable[[], int] = torch.get_num_threads

Task = tuple[Callable[..., object], tuple[Any, ...]]


class ThreadPool:
    """See the module's rules.

    Args:
        name: the worker's, for the names of the threads.
        limit: how many requests may run at once.
        loop: what the leader polls. It is closed with the pool.
    """

    def __init__(self, name: str, limit: int, loop: EventLoop) -> None:
        self.loop = loop
        self._name = name
        self._limit = limit
        self._lock = make_lock("thread_pool")
        self._answers: deque[Task] = deque()  # completions of our own calls, and farprop's own chores
        self._queue = RequestQueue()
        self.requests = self._queue.waiting  # others' calls that wait to be run, under the limit
        # Queues a request. For handlers: their thread looks at the queue next.
        self.push_request: Callable[[Request], None] = self.requests.append
        self._running = 0
        self._activity = loop.activity  # how many of its threads run something and don't wait
        self._answering = 0  # threads that deliver answers, and with them run callbacks, and don't wait
        self._delivering = 0  # the same with those that wait
        self._leader: int | None = None  # the thread that polls
        self._idle: dict[int, OneShot] = {}
        self._coming = 0  # threads that were woken or started, and have taken nothing from the queues yet
        self._threads: set[threading.Thread] = set()
        # By thread, the request that it runs; for inspection, and to know which request a call is made for.
        self.serving: dict[int, Any] = {}
        self._watcher = _Watcher(self)
        self._closed = False

    def start(self) -> None:
        """Start the watcher and the first leader."""
        self._threads.add(self._watcher.start(f"farprop-watcher-{self._name}"))
        with self._lock:
            self._spawn(as_leader=True)

    # Work

    def submit_request(self, request: Request) -> None:
        """Queue a request from any thread."""
        self.requests.append(request)
        self.recruit()

    def push_answer(self, function: Callable[..., None], *args: Any) -> None:
        """Queue something that the limit must not hold up. For handlers, as ``push_request``."""
        self._answers.append((function, args))

    def submit(self, function: Callable[..., object], *args: Any) -> None:
        """Run something on a thread of the pool, from any thread; at the latest while the pool closes."""
        self._answers.append((function, args))
        self.recruit()
        if self._closed:
            self._run_last()

    @property
    def delivers(self) -> bool:
        """Answers are on their way to futures and their callbacks."""
        with self._lock:
            return bool(self._answers or self._delivering)

    # Waiting inside the pool

    def is_polling_thread(self) -> bool:
        """Whether this thread is the leader."""
        return self._leader == _get_ident()

    def poll_until(self, done: Callable[[], bool], deadline: float | None) -> bool:
        """The leader waits for something that a handler will bring: it goes on polling, and leaves all work to others.

        Returns:
            True if it is done; False at the deadline, or if another thread leads, or the pool closes.
        """
        me = _get_ident()
        with self._lock:
            self._running -= this_thread.counted
            self._answering -= this_thread.answering
            self._activity.running -= this_thread.counted + this_thread.answering
            if self._leader == me:
                self._watcher.running_since = None
        try:
            while not done():
                if self._closed or self._leader != me:
                    return False
                if self.requests or self._answers:
                    self.recruit()
                timeout = None
                if deadline is not None:
                    timeout = deadline - _now()
                    if timeout <= 0:
                        return False
                self.loop.may_spin = True
                self.loop.poll(timeout)
            return True
        finally:
            self.loop.may_spin = True  # a thread that runs a request: it has come from there
            with self._lock:
                self._running += this_thread.counted
                self._answering += this_thread.answering
                self._activity.running += this_thread.counted + this_thread.answering
                if self._leader == me:
                    self._watcher.watch()

    def blocked(self) -> Blocked:
        """``with pool.blocked():`` around a wait on a pool thread, so that its place is free for others."""
        return Blocked(self)

    def yield_polling(self) -> None:
        """The leader is about to wait, or to run something known to be slow: another thread polls from now on."""
        with self._lock:
            if self._leader == _get_ident():
                self._hand_over_polling()

    def recruit(self) -> None:
        """Have some thread other than the leader run what is queued, unless enough are on their way already: a
        thousand answers at once must not wake a thousand threads, which would only wait for each other.
        """
        with self._lock:
            if self._closed:
                return
            if self._leader is None:
                self._hand_over_polling()
                return
            answers = min(len(self._answers), _MAX_ANSWERING - self._answering)
            requests = min(len(self._queue), self._limit - self._running)
            if self._coming >= max(0, answers) + max(0, requests):
                return
            if self._idle:
                # An interrupt can't come between the last three lines: nothing is called there.
                last = next(reversed(self._idle))
                idle = self._idle[last]
                del self._idle[last]
                self._coming += 1
                idle.set()
            elif len(self._threads) < _MAX_THREADS:
                self._spawn(as_leader=False)

    # Threads

    def _spawn(self, as_leader: bool) -> None:
        ready = OneShot()
        thread = threading.Thread(target=self._thread_main, args=(ready,), name=f"farprop-{self._name}", daemon=True)
        self._coming += 1
        try:
            self._threads.add(thread)
            thread.start()
        except BaseException:
            # Interrupted, or there is no room for a thread. It may run nevertheless, but nobody can wait for it.
            if thread.ident is None:
                self._coming -= 1
                self._threads.discard(thread)
            raise
        finally:
            if as_leader:
                self._leader = thread.ident
            ready.set()

    def _thread_main(self, ready: OneShot) -> None:
        this_thread.pool = self
        this_thread.counted = this_thread.answering = 0
        me = _get_ident()
        ready.wait()
        coming = True
        try:
            while not self._closed:
                if self._answers:
                    self._run_answers(me, coming)
                    coming = False
                elif self.requests and self._running < self._limit:
                    self._run_request(me, coming)
                    coming = False
                elif self._leader == me:
                    if coming:
                        with self._lock:
                            self._coming -= 1
                        coming = False
                    self.loop.poll()
                else:
                    rested = self._rest(me, coming)
                    if rested is None:
                        return
                    coming = rested
        finally:
            this_thread.pool = None
            with self._lock:
                self._threads.discard(threading.current_thread())
                if self._leader == me and not self._closed:
                    self._hand_over_polling()

    def _run_request(self, me: int, coming: bool) -> None:
        with self._lock:
            if coming:
                self._coming -= 1
            requests, queue = self.requests, self._queue
            if not requests or self._running >= self._limit:
                return  # another thread was faster
            in_turn = queue.dealt or len(requests) > LONG
            _, function, args = queue.pop_sorted() if in_turn else requests.popleft()
            self._running += 1
            self._activity.running += 1
            if self._leader == me:
                self._watcher.watch()
        this_thread.counted = 1
        adopt_num_threads()
        try:
            function(*args)
        except Exception:
            _log.exception("farprop: unexpected error in a pool thread")
        finally:
            # What was called may hold tensors: it must not outlive the call in this frame.
            function = args = None  # type: ignore[assignment]
            with self._lock:
                self._running -= 1
                self._activity.running -= 1
                if self._leader == me:
                    self._watcher.running_since = None

    def _run_answers(self, me: int, coming: bool) -> None:
        """Run what the limit does not hold up, one after the other; other threads may take from the queue meanwhile."""
        answers, lock = self._answers, self._lock
        this_thread.counted = 0
        adopt_num_threads()
        while True:
            with lock:
                try:
                    function, args = answers.popleft()
                except IndexError:
                    break
                if coming:
                    self._coming -= 1
                    coming = False
                self._answering += 1
                self._delivering += 1
                self._activity.running += 1
                if self._leader == me:
                    self._watcher.watch()
            this_thread.answering = 1
            try:
                function(*args)
            except Exception:
                _log.exception("farprop: unexpected error in a pool thread")
            function = args = None  # type: ignore[assignment]
            this_thread.answering = 0
            with lock:
                self._answering -= 1
                self._delivering -= 1
                self._activity.running -= 1
        with lock:
            if coming:
                self._coming -= 1
            if self._leader == me:
                self._watcher.running_since = None

    def _rest(self, me: int, coming: bool) -> bool | None:
        """Sleep until there is something to do.

        Returns:
            Whether this thread counts as coming, because another one woke it; None if it should end.
        """
        woken = OneShot()
        with self._lock:
            if coming:
                self._coming -= 1
            if self._closed:
                return None
            if self._leader == me or self._answers or (self.requests and self._running < self._limit):
                return False
            self._idle[me] = woken
        if not woken.wait(timeout=_REST_SECONDS):
            with self._lock:
                if self._idle.pop(me, None) is not None:
                    return False if len(self._threads) <= self._limit else None
        return None if self._closed else True

    def _hand_over_polling(self) -> None:
        """Make an idle or new thread the leader. Called under the lock."""
        self._watcher.running_since = None
        if self._closed:
            self._leader = None
        elif self._idle:
            last = next(reversed(self._idle))  # as in ``recruit``
            idle = self._idle[last]
            del self._idle[last]
            self._leader = last
            self._coming += 1
            idle.set()
        else:
            self._spawn(as_leader=True)

    # Ending

    def close(self, timeout: float) -> None:
        """Stop polling and end the threads; those that still run something end when it does."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for idle in self._idle.values():
                idle.set()
            self._idle.clear()
            self._watcher.wake()
        self.loop.wake()
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
        self._queue.clear()
        self.loop.close()

    def abandon(self) -> None:
        """In a forked child: the threads are not here, only the loop's descriptors."""
        self._closed = True
        self.loop.close()

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

    def queued(self) -> list[Request]:
        """The requests that wait for a thread, in the order of their arrival, roughly."""
        with self._lock:
            return self._queue.all()

    def facts(self) -> dict[str, int]:
        """Numbers for ``get_debug_info``."""
        return {
            "threads": len(self._threads) - 1,
            "limit": self._limit,
            "idle": len(self._idle),
            "running": self._running,
            "queued": len(self._queue),
        }


class _Watcher:
    """A thread that looks at the time while the leader runs something. When nothing runs it sleeps.

    Each look takes the interpreter's lock from a thread that works. So the watcher looks less and less often while
    nothing stalls: most functions take as long as the last time, and the server knows those that are slow. Its fields
    are under the pool's lock.
    """

    def __init__(self, pool: ThreadPool) -> None:
        self.running_since: float | None = None  # when the leader began to run something
        self._pool = pool
        self._waker = Waker()
        self._is_awake = False

    def start(self, name: str) -> threading.Thread:
        thread = threading.Thread(target=self._main, name=name, daemon=True)
        thread.start()
        return thread

    def watch(self) -> None:
        """The leader begins to run something. Called under the lock."""
        self.running_since = _now()
        if not self._is_awake:
            self.wake()

    def wake(self) -> None:
        self._is_awake = True
        self._waker.wake()

    def _main(self) -> None:
        pool = self._pool
        while not pool._closed:
            self._waker.wait()
            quiet = 0
            tick = STALL
            while quiet <= _WATCH_TICKS and not pool._closed:
                self._waker.wait(timeout=tick)
                tick = min(2 * tick, _LONGEST_TICK)
                stalled = False
                with pool._lock:
                    since = self.running_since
                    if since is None:
                        quiet += 1
                        self._is_awake = quiet <= _WATCH_TICKS
                    else:
                        quiet = 0
                        if _now() - since > STALL:
                            pool._hand_over_polling()
                            stalled = True
                            tick = STALL
                if stalled:
                    pool.loop.on_pause()


class Blocked:
    """See ``ThreadPool.blocked``."""

    __slots__ = ("_is_pooled", "_pool")

    def __init__(self, pool: ThreadPool) -> None:
        self._pool = pool
        self._is_pooled = False

    def __enter__(self) -> None:
        pool = self._pool
        if getattr(this_thread, "pool", None) is pool:
            self._is_pooled = True
            with pool._lock:
                pool._running -= this_thread.counted
                pool._answering -= this_thread.answering
                pool._activity.running -= this_thread.counted + this_thread.answering
                if pool._leader == _get_ident():
                    pool._hand_over_polling()
            if pool.requests or pool._answers:
                pool.recruit()

    def __exit__(self, *_: object) -> None:
        if self._is_pooled:
            with self._pool._lock:
                self._pool._running += this_thread.counted
                self._pool._answering += this_thread.answering
                self._pool._activity.running += this_thread.counted + this_thread.answering


# ``pool``; ``counted`` and ``answering``: what this thread adds to the pool's numbers; ``makes_nested_calls``: those
# of called functions, although it is no thread of the pool; ``runs_coroutines_of``: the worker whose coroutines it
# runs.
this_thread = threading.local()

# The request that a coroutine belongs to: all coroutines run on one thread.
coroutine_of: ContextVar[Any] = ContextVar("farprop_coroutine_of", default=None)


def pool_of_this_thread() -> ThreadPool | None:
    """The pool that this thread belongs to."""
    return getattr(this_thread, "pool", None)


def check_may_block(use: str, instead: str = "`await rpc.rpc_async(...)`, `await future`, `await rref`") -> None:
    """Raise ``UsageError`` in a coroutine that was called on this worker: all of them share one thread."""
    worker = getattr(this_thread, "runs_coroutines_of", None)
    if worker is not None:
        raise UsageError(
            f"{use} would block all coroutines of {worker}: the async def functions that are called on a worker share "
            f"one thread. Use await: {instead}. What has no form to await runs in a thread: "
            "`await asyncio.to_thread(function, ...)`."
        )
