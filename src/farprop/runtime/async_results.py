"""Results that are not there when a called function returns: coroutines, futures, and deferred values.

A called function may be an ``async def`` function, which ``AsyncioThread`` runs, or return a future
(``rpc.functions.async_execution``). Farprop's own handlers return a ``Deferred``. No thread waits for any of them. Once
a result is there, ``answer`` is called with it, or ``fail`` with its error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from types import CoroutineType
from typing import Any, Protocol

from farprop._torch import Future, ScriptFunction
from farprop.errors import CallCancelledError
from farprop.locks import make_lock
from farprop.runtime import futures
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.request_queue import OWN
from farprop.runtime.thread_pool import ThreadPool, adopt_num_threads, coroutine_of, this_thread

Answer = Callable[[Any], None]
Fail = Callable[[BaseException], None]


class ServedRequest(Protocol):
    """The request whose function has returned something that is not done."""

    @property
    def is_cancelled(self) -> bool:
        """Whether its caller does not want the answer any more."""

    def stop_with(self, stop: Callable[[], object]) -> bool:
        """Call ``stop`` when its caller cancels it. Returns whether it has done so already: then it is not called."""


class Deferred:
    """What a handler of farprop's returns when it has to wait before it has its result.

    Args:
        subscribe: Calls its argument back when the wait is over.
        resume: Returns the result, after that. Not called if the caller has cancelled the call. If it is None,
            ``subscribe`` gets two functions, and calls the first one with the result or the second one with the error,
            on a thread of the pool or that of coroutines.
        stop: Ends the wait sooner, if something can.
    """

    __slots__ = ("resume", "stop", "subscribe")

    def __init__(
        self,
        subscribe: Callable[..., None],
        resume: Callable[[], Any] | None,
        stop: Callable[[], object] | None = None,
    ) -> None:
        self.subscribe = subscribe
        self.resume = resume
        self.stop = stop

    def wrapped(self, run: Callable[[Callable[[], Any]], Any]) -> Deferred:
        """The same, with ``run`` called with ``resume`` instead of ``resume``."""
        return self if self.resume is None else Deferred(self.subscribe, partial(run, self.resume), self.stop)


def stop_of(future: Any) -> Callable[[], object] | None:
    """How to cancel what a future waits for; None if it can't be cancelled."""
    return future.cancel if isinstance(future, futures.Future) else None


def not_a_future(function: Any, value: Any) -> RuntimeError:
    """The error, in torch's words, of a function decorated with ``async_execution`` that did not return a future."""
    if isinstance(function._wrapped_async_rpc_function, ScriptFunction):
        return RuntimeError(
            f"Async functions must return an IValue of Future type, but got {type(value).__name__}. Return a Future, "
            "or drop the decorator."
        )
    return RuntimeError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but "
        f"this one returned {type(value).__name__}. Return a Future, or drop the decorator."
    )


class CoroutineRun:
    """A coroutine of a called function, on the thread of ``loop``. It calls ``answer`` with its result there, or
    ``fail`` with its error.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], answer: Answer, fail: Fail
    ) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._answer = answer
        self._fail = fail
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False

    def start(self) -> None:
        """Run it, in the current context variables."""
        try:
            self._loop.call_soon_threadsafe(self._start)
        except RuntimeError:  # the loop is closed: this worker shuts down
            self.give_up()

    def stop(self) -> None:
        """Raise ``CancelledError`` in it. If it has not begun, it does not begin."""
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:
            pass  # the loop is closed, and has cancelled everything

    def give_up(self) -> None:
        """It does not run."""
        self._coroutine.close()
        self._fail(_cancelled())

    def _start(self) -> None:
        if self._is_stopped:
            self.give_up()
            return
        self._task = self._loop.create_task(self._settle())
        self._task.add_done_callback(self._on_done)

    def _stop(self) -> None:
        self._is_stopped = True
        if self._task is not None:
            self._task.cancel()

    async def _settle(self) -> None:
        try:
            result = await self._coroutine
        except BaseException as error:
            self._fail(error)
        else:
            self._answer(result)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # before its first step: nothing has answered
            self.give_up()


class AsyncioThread:
    """One thread with an asyncio event loop, started by the first coroutine. All coroutines share it."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = make_lock("asyncio_thread")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The loop, which runs; None after ``close``."""
        return self._loop or self._started()

    def _started(self) -> asyncio.AbstractEventLoop | None:
        with self._lock:
            if self._loop is None and not self._is_closed:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run_forever, args=(self._loop,), name=f"farprop-async-{self._worker}", daemon=True
                )
                self._thread.start()
            return self._loop

    def _run_forever(self, loop: asyncio.AbstractEventLoop) -> None:
        this_thread.makes_nested_calls = True
        this_thread.runs_coroutines_of = self._worker
        adopt_num_threads()
        loop.run_forever()

    def close(self) -> None:
        """Cancel all coroutines and end the thread."""
        with self._lock:
            self._is_closed = True
            if self._loop is None or self._thread is None:
                return
            loop, thread = self._loop, self._thread
            self._loop = None

        def cancel_all() -> None:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.call_soon(loop.stop)

        loop.call_soon_threadsafe(cancel_all)
        if thread is not threading.current_thread():
            thread.join(2.0)
            if not thread.is_alive():
                loop.close()


class AsyncResults:
    """The results that requests to this worker wait for."""

    def __init__(self, threads: ThreadPool, worker: str) -> None:
        self.futures = 0  # that are not done yet
        self._threads = threads
        self._coroutines = AsyncioThread(worker)
        self._lock = make_lock("async_results")

    def on_future(self, function: Any, value: Any, answer: Answer, fail: Fail, request: ServedRequest) -> None:
        """A function decorated with ``async_execution`` has returned a value, which should be a future."""
        if not isinstance(value, Future):
            fail(not_a_future(function, value))
            return
        with self._lock:
            self.futures += 1

        def done(future: Any) -> None:
            with self._lock:
                self.futures -= 1
            try:
                result = future.wait()
            except BaseException as error:
                fail(error)
                error.__traceback__ = None  # a cycle through its frames and the future, which the collector can't see
            else:
                answer(result)

        stop = stop_of(value)
        if stop is not None and request.stop_with(stop):
            stop()
        value.add_done_callback(done)

    def on_unfinished(
        self,
        value: CoroutineType[Any, Any, Any] | Deferred,
        context: Context | None,
        answer: Answer,
        fail: Fail,
        request: ServedRequest,
    ) -> None:
        """A function has returned a coroutine or a deferred value, which runs in this autograd context."""
        if isinstance(value, CoroutineType):
            loop = self._coroutines.loop
            if loop is None:  # this worker shuts down
                value.close()
                fail(_cancelled())
                return
            run = CoroutineRun(loop, value, answer, fail)
            if request.stop_with(run.stop):
                run.give_up()
                return
            outer = current_context.set(context)  # a task copies the context variables of its creator
            serving = coroutine_of.set(request)
            run.start()
            coroutine_of.reset(serving)
            current_context.reset(outer)
        elif value.resume is None:
            value.subscribe(answer, fail)
        else:
            if value.stop is not None and request.stop_with(value.stop):
                value.stop()
            resume = OWN, self._resume, (value.resume, context, answer, fail, request)
            value.subscribe(lambda: self._threads.submit_request(resume))

    def _resume(
        self,
        resume: Callable[[], Any],
        context: Context | None,
        answer: Answer,
        fail: Fail,
        request: ServedRequest,
    ) -> None:
        if request.is_cancelled:
            fail(_cancelled())
            return
        outer = current_context.set(context)
        me = threading.get_ident()
        self._threads.serving[me] = request
        try:
            value = resume()
        except BaseException as error:
            fail(error)
            error.__traceback__ = None  # as in on_future
        else:
            if type(value) is CoroutineType or type(value) is Deferred:
                self.on_unfinished(value, context, answer, fail, request)
            else:
                answer(value)
        finally:
            self._threads.serving.pop(me, None)
            current_context.reset(outer)

    def close(self) -> None:
        """Cancel all coroutines."""
        self._coroutines.close()


def _cancelled() -> CallCancelledError:
    return CallCancelledError("Its caller has cancelled this call, or this worker has shut down, before it was run.")
