"""Tasks: the functions that the driver runs on a worker of a pool, and can interrupt. This runs on the worker.

A task runs on a thread outside of farprop's pool. ``KeyboardInterrupt`` is raised there at any line, and what such a
thread runs of farprop's bears that, as the main thread does; an interrupted thread that polls would not.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from typing import Any

from farprop.locks import make_lock
from farprop.rpc.constants import DEFAULT_NUM_WORKER_THREADS
from farprop.runtime.async_results import Deferred
from farprop.runtime.thread_pool import adopt_num_threads, coroutine_of, pool_of_this_thread, this_thread
from farprop.wire.function_names import resolve, shown_name

_MOST_THREADS = DEFAULT_NUM_WORKER_THREADS
# An interrupt may come before its task, or after its end. Tasks that it came too late for are forgotten in this order.
_MOST_REVOKED = 1000

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = [ctypes.c_ulong, ctypes.py_object]
_NO_EXCEPTION = ctypes.py_object()

Work = Callable[[], Any]


class _Task:
    """A call of a function. ``outcome`` returns its result or raises its error, once ``done`` was called."""

    def __init__(self, number: int, work: Work, context: Context) -> None:
        self.number = number
        self.work: Work | None = work
        self.context = context
        self.outcome: Callable[[], Any] = _not_done
        self._callbacks: deque[Callable[..., None]] = deque()
        self._is_done = False

    def subscribe(self, callback: Callable[..., None]) -> None:
        """Call back once when the task is done."""
        self._callbacks.append(callback)
        if self._is_done:
            self.call_back()

    def done(self, outcome: Callable[[], Any]) -> None:
        self.work = None  # the arguments end with the call
        self.outcome = outcome
        self._is_done = True
        self.call_back()

    def call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:
                return  # the other thread was faster
            callback()


class Tasks:
    """The tasks of this process: those that wait, those that run and their threads."""

    def __init__(self) -> None:
        self._lock = make_lock("tasks")
        self._waiting: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._threads = 0
        self._open = 0  # tasks that wait or run
        self._running: dict[int, int] = {}  # task to thread
        self._revoked: deque[int] = deque(maxlen=_MOST_REVOKED)

    def start(self, task: _Task) -> None:
        with self._lock:
            self._open += 1
            needs_thread = self._threads < min(self._open, _MOST_THREADS)
            self._threads += needs_thread
            self._waiting.put(task)
        if needs_thread:
            threading.Thread(target=self._serve, name="farprop-task", daemon=True).start()

    def interrupt(self, number: int) -> None:
        """Raise ``KeyboardInterrupt`` in a task, once; one that has not begun never begins."""
        with self._lock:
            thread = self._running.pop(number, None)
            if thread is None:
                self._revoked.append(number)
            else:
                _set_async_exc(thread, ctypes.py_object(KeyboardInterrupt))

    def _serve(self) -> None:
        this_thread.makes_nested_calls = True
        adopt_num_threads()
        while True:
            task = self._waiting.get()
            task.context.run(self._run, task)
            del task
            with self._lock:
                self._open -= 1

    def _run(self, task: _Task) -> None:
        try:
            value = self._interruptible(task)
        except BaseException as error:
            task.done(_raiser(error))
        else:
            task.done(lambda: value)

    def _interruptible(self, task: _Task) -> Any:
        work = task.work
        assert work is not None
        me = threading.get_ident()
        try:
            with self._lock:
                if task.number in self._revoked:
                    self._revoked.remove(task.number)
                    raise KeyboardInterrupt
                self._running[task.number] = me
            return work()
        finally:
            # An interrupt that came with the end of the function is raised in here, or is still pending and dropped.
            # There is one for each task at most.
            try:
                self._end(task.number, me)
            except KeyboardInterrupt:
                self._end(task.number, me)

    def _end(self, number: int, thread: int) -> None:
        with self._lock:
            self._running.pop(number, None)
            _set_async_exc(thread, _NO_EXCEPTION)


_tasks = Tasks()


class Interruptible:
    """A function as the driver sends it: it runs as a task, under its own name. Calling it returns its result, later.

    Args:
        number: the number of the task, unique among those of the driver.
        function: the function, or its importable name.
    """

    def __init__(self, number: int, function: Any) -> None:
        self._number = number
        self._function = function
        # What is shown of it, by errors and by who looks into the job.
        name = shown_name(function) if type(function) is bytes else shown_name(b"", function)
        self.__name__ = self.__qualname__ = name

    def __reduce__(self) -> tuple[type[Interruptible], tuple[int, Any]]:
        return Interruptible, (self._number, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Deferred:
        called = resolve(self._function) if type(self._function) is bytes else self._function
        pool = pool_of_this_thread()
        request = None if pool is None else pool.serving.get(threading.get_ident())
        serving = coroutine_of.set(request)
        task = _Task(self._number, lambda: called(*args, **kwargs), copy_context())
        coroutine_of.reset(serving)
        _tasks.start(task)
        return Deferred(task.subscribe, lambda: task.outcome())


def interrupt(number: int) -> None:
    """Interrupt a task of this worker."""
    _tasks.interrupt(number)


def _not_done() -> Any:
    raise AssertionError("the task is not done")


def _raiser(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it
