"""Results that are not there when a called function returns: coroutines, futures, and deferred values.

A called function may be an ``async def`` function, which ``AsyncioThread`` runs, or return a future
(``rpc.functions.async_execution``). Farprop's own handlers return a ``Deferred``. No thread waits for any of them. Once
a result is there, ``answer`` is called with it, or ``fail`` with its error.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import CoroutineType
from typing import Any

from farprop._torch import Future, ScriptFunction
from farprop.locks import make_lock
from farprop.runtime.autograd.contexts import Context, current_context
from farprop.runtime.request_queue import OWN
from farprop.runtime.thread_pool import ThreadPool, coroutine_of, this_thread

Answer = Callable[[Any], None]
Fail = Callable[[BaseException], None]


class Deferred:
    """What a handler of farprop's returns when it has to wait before it has its result.

    Args:
        subscribe: Calls its argument back when the wait is over.
        resume: Returns the result, after that.
    """

    __slots__ = ("resume", "subscribe")

    def __init__(self, subscribe: Callable[[Callable[..., None]], None], resume: Callable[[], Any]) -> None:
        self.subscribe = subscribe
        self.resume = resume


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


class AsyncioThread:
    """One thread with an asyncio event loop, started by the first coroutine."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._lock = make_lock("asyncio_thread")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(
        self,
        coroutine: Coroutine[Any, Any, Any],
        answer: Answer,
        fail: Fail,
    ) -> None:
        """Run a coroutine on the thread, and call ``answer`` with its result or ``fail`` with its error there."""

        async def settle() -> None:
            try:
                result = await coroutine
            except BaseException as error:
                fail(error)
            else:
                answer(result)

        asyncio.run_coroutine_threadsafe(settle(), self._started())

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run_forever, args=(self._loop,), name=f"farprop-async-{self._worker}", daemon=True
                )
                self._thread.start()
            return self._loop

    def _run_forever(self, loop: asyncio.AbstractEventLoop) -> None:
        this_thread.makes_nested_calls = True
        loop.run_forever()

    def close(self) -> None:
        """Cancel all coroutines and end the thread."""
        with self._lock:
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

    def on_future(self, function: Any, value: Any, answer: Answer, fail: Fail) -> None:
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

        value.add_done_callback(done)

    def on_unfinished(
        self,
        value: CoroutineType[Any, Any, Any] | Deferred,
        context: Context | None,
        answer: Answer,
        fail: Fail,
        request_of: object = None,
    ) -> None:
        """A function has returned a coroutine or a deferred value, which runs in this autograd context.

        ``request_of`` is the request that it belongs to, for inspection.
        """
        if isinstance(value, CoroutineType):
            outer = current_context.set(context)  # a task copies the context variables of its creator
            serving = coroutine_of.set(request_of)
            self._coroutines.run(value, answer, fail)
            coroutine_of.reset(serving)
            current_context.reset(outer)
        else:
            request = OWN, self._resume, (value, context, answer, fail, request_of)
            value.subscribe(lambda: self._threads.submit_request(request))

    def _resume(
        self, deferred: Deferred, context: Context | None, answer: Answer, fail: Fail, request_of: object
    ) -> None:
        outer = current_context.set(context)
        me = threading.get_ident()
        self._threads.serving[me] = request_of
        try:
            value = deferred.resume()
        except BaseException as error:
            fail(error)
            error.__traceback__ = None  # as in on_future
        else:
            if type(value) is CoroutineType or type(value) is Deferred:
                self.on_unfinished(value, context, answer, fail, request_of)
            else:
                answer(value)
        finally:
            self._threads.serving.pop(me, None)
            current_context.reset(outer)

    def close(self) -> None:
        """Cancel all coroutines."""
        self._coroutines.close()
