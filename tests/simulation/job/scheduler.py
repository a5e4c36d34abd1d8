"""Virtual time, and the threads of all simulated processes: real threads, of which exactly one runs at a time.

A thread gives up its turn only where it waits: for a wake-up, a time, or input. So everything follows from the seed,
and a wait costs no time. The classes at the end take the places of those that farprop's code waits with.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any

from farprop.rpc import api
from farprop.runtime import agent_registry
from farprop.runtime.thread_pool import this_thread
from tests.simulation import harness

if TYPE_CHECKING:
    from tests.simulation.job.process import Process


class Violation(harness.Violation):
    """Farprop broke a promise. It ends the run even if code of farprop's catches it, as that of a called function."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        scheduler.failure = scheduler.failure or self


class Killed(BaseException):
    """The process of this thread has died, or the run is over."""


class Mode(Enum):
    """What a thread does."""

    KERNEL = "deliver something, as the network and the kernels do"
    LOOP = "call a handler or a timer of an event loop: it must not wait"
    POOL = "run something on a thread of a worker's pool"
    PROGRAM = "run the program of a worker"


class Timer:
    """Something that happens at a time, unless it is cancelled."""

    __slots__ = ("action", "args", "mode", "process", "when")

    def __init__(
        self, when: float, process: Process | None, mode: Mode, action: Callable[..., object] | Thread, args: Any
    ) -> None:
        self.when = when
        self.process = process
        self.mode = mode
        self.action: Callable[..., object] | Thread | None = action
        self.args = args

    def cancel(self) -> bool:
        was_set, self.action = self.action is not None, None
        return was_set


class Thread:
    """A real thread, which runs one thing after the other. It has the turn while it holds its baton."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.baton = threading.Lock()
        self.baton.acquire()
        self.process: Process | None = None
        self.mode = Mode.KERNEL
        self.is_killed = False
        self.is_woken = False
        self.timeout: Timer | None = None
        self._scheduler = scheduler
        threading.Thread(target=self._main, daemon=True).start()

    def _main(self) -> None:
        while True:
            self.baton.acquire()
            self._scheduler.drive(self)


class Scheduler:
    """The clock, and whose turn it is. There is one for each real process; ``reset`` begins another run."""

    def __init__(self) -> None:
        self._idle: list[Thread] = []
        self._main = threading.Lock()
        self._main.acquire()
        self._parked: dict[Thread, None] = {}
        self._is_closing = False
        self.current: Thread | None = None
        self.reset()

    def reset(self) -> None:
        self.now = 0.0
        self.steps = 0
        self.switches = 0
        self.failure: BaseException | None = None
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._until: Callable[[], bool] | None = None

    def monotonic(self) -> float:
        return self.now

    def after(
        self, delay: float, process: Process | None, mode: Mode, action: Callable[..., object] | Thread, *args: Any
    ) -> Timer:
        return self.at(self.now + delay, process, mode, action, *args)

    def at(
        self, when: float, process: Process | None, mode: Mode, action: Callable[..., object] | Thread, *args: Any
    ) -> Timer:
        timer = Timer(when, process, mode, action, args)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    @property
    def parked(self) -> list[Thread]:
        """The threads that wait for something."""
        return list(self._parked)

    # Taking turns

    def run(self, until: Callable[[], bool], limit: float) -> None:
        """Let things happen until ``until()``, or until nothing is left to happen. Raises what went wrong."""
        self._until, self._limit = until, self.now + limit
        self._next_thread().baton.release()
        self._main.acquire()
        if self.failure is not None:
            raise self.failure

    def drive(self, me: Thread) -> None:
        """Let one thing happen after the other on this thread, until another thread has to go on."""
        while True:
            if self._is_closing or self.failure is not None or not self._timers or self._until():  # type: ignore[misc]
                self._idle.append(me)
                self._main.release()
                return
            self.now, _, timer = heapq.heappop(self._timers)
            action, process = timer.action, timer.process
            if action is None or (process is not None and process.is_dead):
                continue
            self.steps += 1
            if self.now > self._limit:
                self.failure = Violation(f"things happen for ever, such as {action}")
                continue
            timer.action = None
            if isinstance(action, Thread):
                self._idle.append(me)
                action.baton.release()
                return
            me.process, me.mode = process, timer.mode
            self._take_turn(me)
            this_thread.pool = None if process is None or timer.mode is Mode.PROGRAM else process.pool
            try:
                action(*timer.args)
            except Killed:
                pass
            except BaseException as error:
                if process is None or not process.is_dead:
                    self.failure = self.failure or error
            self._end_turn(me)
            me.process = None

    def park(self, seconds: float | None) -> bool:
        """This thread waits; returns whether it was woken, and not by the time."""
        me = self.current
        assert me is not None
        if me.is_killed or (me.process is not None and me.process.is_dead):
            raise Killed
        if me.mode in (Mode.LOOP, Mode.KERNEL):
            raise Violation(f"a handler of the event loop waits ({me.process})")
        me.is_woken = False
        me.timeout = None if seconds is None else self.after(max(0.0, seconds), me.process, me.mode, me)
        self._parked[me] = None
        self._end_turn(me)
        self.switches += 1
        self._next_thread().baton.release()
        me.baton.acquire()
        del self._parked[me]
        self._take_turn(me)
        if me.is_killed:
            raise Killed
        return me.is_woken

    def wake(self, thread: Thread) -> None:
        if thread in self._parked and not thread.is_woken:
            thread.is_woken = True
            if thread.timeout is not None:
                thread.timeout.cancel()
            self.after(0.0, thread.process, thread.mode, thread)

    def kill_parked(self) -> None:
        """The run is over: unwind all threads."""
        self._is_closing = True
        while self._parked:
            thread = next(iter(self._parked))
            thread.is_killed = True
            thread.baton.release()
            self._main.acquire()
            thread.is_killed = False
        self._is_closing = False
        self._timers = []
        self.current = None

    def _next_thread(self) -> Thread:
        return self._idle.pop() if self._idle else Thread(self)

    def _take_turn(self, me: Thread) -> None:
        self.current = me
        process = me.process
        if process is not None:
            agent_registry.installed = process.installed
            api._gathers = process.gathers

    def _end_turn(self, me: Thread) -> None:
        if me.process is not None:
            me.process.installed = agent_registry.installed


scheduler = Scheduler()


class Signal:
    """Takes the places of ``Waker``, ``OneShot``, ``DoneSignal`` and ``threading.Event``."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: dict[Thread, None] = {}

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            scheduler.wake(thread)

    wake = set

    def on_done(self, _: object) -> None:
        self.set()

    def clear(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def wait(self, timeout: float | None = None) -> bool:
        """As ``Event.wait``."""
        if timeout is not None and timeout < 0:
            timeout = None
        if not self._is_set:
            me = scheduler.current
            assert me is not None
            self._waiting[me] = None
            try:
                scheduler.park(timeout)
            finally:
                del self._waiting[me]
        return self._is_set


class Waker(Signal):
    """Wakes one thread, any number of times."""

    def wait(self, timeout: float | None = None) -> bool:
        woken = super().wait(timeout)
        self.clear()
        return woken


class Time:
    """Takes the place of the module ``time``."""

    monotonic = perf_counter = time = staticmethod(scheduler.monotonic)

    @staticmethod
    def sleep(seconds: float) -> None:
        """Sleeps may take longer than one asks for. Here all do that poll for something: it saves many steps."""
        scheduler.park(max(seconds, 0.01))
