"""Results that come later: how a request is answered after its handler has returned, without a thread that waits.

A called function may be an ``async def`` function, which ``AsyncioThread`` runs, or return a future
(``rpc.functions.async_execution``). Farprop's own handlers return a ``Deferred``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from farprop._torch import ScriptFunction
from farprop.locks import make_lock


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
        answer: Callable[[Any], None],
        fail: Callable[[BaseException], None],
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
                    target=self._loop.run_forever, name=f"farprop-async-{self._worker}", daemon=True
                )
                self._thread.start()
            return self._loop

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
