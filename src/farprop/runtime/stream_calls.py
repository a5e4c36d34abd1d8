"""The streams that this worker iterates over, whose generators are on other workers or on itself.

A stream is opened by one call, and its items come as answers to others, the pulls: so they have what calls have, and a
lost worker fails them as it fails calls. ``Consumer`` decides how many pulls are sent, and when. Rules that hold here:

- One thread or task at a time takes items. Any thread may close the stream.
- Whatever ends the iteration other than the end of the items, also an interrupt, closes the stream.
- Closing does not wait: a thread of the pool tells the callee, once.
- In a thread with an asyncio loop nothing waits: what might is done on a thread of the pool, one for each worker that
  is called, however many streams there are.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from farprop.errors import ConnectionLostError, FarpropError, RpcTimeoutError, UsageError
from farprop.locks import make_lock
from farprop.protocol.streams import Consumer
from farprop.runtime.autograd.contexts import current_context
from farprop.runtime.call_modes import Autocast
from farprop.runtime.calls import FutureResponse
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.first_failure import explained
from farprop.runtime.futures import Future, wait_until
from farprop.runtime.loop_inbox import running_inbox
from farprop.runtime.peers import Peers
from farprop.runtime.services import WorkerServices
from farprop.runtime.thread_pool import check_may_block
from farprop.wire.function_names import shown_name
from farprop.wire.message import SYSTEM, Method

_CLOSE_SECONDS = 60.0  # how long the call that closes a stream may take: nobody waits for it

CallAsync = Callable[..., None]


class _NoMore(Exception):
    """The stream has ended."""


class StreamCalls:
    """All of them. Methods may be called from any thread.

    Args:
        call_async: makes a call.
        peers: knows the connections.
        services: run what would wait, and what finalisers ask for.
    """

    def __init__(self, call_async: CallAsync, peers: Peers, services: WorkerServices) -> None:
        self.call_async = call_async
        self.peers = peers
        self.services = services
        self.collected: deque[StreamWatch] = deque()  # noted by C code, too: an interrupt may end a finaliser
        self._numbers = itertools.count(1)
        self._watches: dict[int, StreamWatch] = {}  # of the streams that the program has
        self._later: dict[
            str, deque[tuple[Future, Callable[[], None]]]
        ] = {}  # calls that a thread will send, by worker
        self._lock = make_lock("stream_senders")
        self._sending: set[str] = set()  # workers that a thread sends calls to

    def new(self, to: str, function: Any, timeout: float | None, window: int) -> StreamCall:
        """A stream of a worker's function; ``timeout`` is in seconds for each item, or None."""
        if self.collected:
            self.services.submit(self.close_collected)
        return StreamCall(self, to, next(self._numbers), function, timeout, window)

    def send_later(self, worker: str, future: Future, send: Callable[[], None]) -> None:
        """Have a thread of the pool send a call, which may have to wait for a connection, or for room on it."""
        self._later.setdefault(worker, deque()).append((future, send))
        self.services.submit(self._send_to, worker)

    def _send_to(self, worker: str) -> None:
        """On a thread of the pool: send what waits to be sent to a worker, unless another thread does."""
        later = self._later[worker]
        with self._lock:
            if worker in self._sending:
                return  # it looks again before it ends
            self._sending.add(worker)
        while True:
            with self._lock:
                if not later:
                    self._sending.discard(worker)
                    return
                waiting = [later.popleft() for _ in range(len(later))]
            try:
                self.peers.connect(worker)
            except Exception as error:
                for future, _ in waiting:
                    future.set_exception(error)
                continue
            for _, send in waiting:
                send()

    def watch(self, stream: object, call: StreamCall) -> StreamWatch:
        """Close a stream when the program's object for it is collected."""
        watch = StreamWatch(stream, self.collected.append)
        watch.call = call
        self._watches[call.number] = watch
        return watch

    def close_collected(self) -> None:
        """Close the streams that the program has dropped. On a thread of the pool, where no interrupt comes."""
        while self.collected:
            with suppress(IndexError):
                call = self.collected.popleft().call
                self._watches.pop(call.number, None)
                call.close()

    def on_collected(self, watch: StreamWatch) -> None:
        """For a finaliser: takes no lock."""
        self.collected.append(watch)
        self.services.call_at_lockfree(0.0, lambda: self.services.submit(self.close_collected))

    def __len__(self) -> int:
        return len(self._watches)

    def close_unawaited(self) -> None:
        """This worker shuts down: close the streams that nobody waits for just now."""
        for watch in list(self._watches.values()):
            call = watch.call
            if not call.is_awaited:
                call.fail(
                    UsageError(
                        f"The stream of {call.function} from {call.worker} was closed by rpc.shutdown. Iterate to its "
                        "end, or close it, before the shutdown."
                    )
                )


class StreamWatch(weakref.ref[Any]):
    """Notes that the program has dropped a stream."""

    __slots__ = ("call",)

    call: StreamCall


class StreamCall:
    """One of them. See the module's rules."""

    def __init__(
        self, calls: StreamCalls, worker: str, number: int, function: Any, timeout: float | None, window: int
    ) -> None:
        self.worker = worker
        self.number = number
        self.is_awaited = False  # a thread or a task waits for an item
        self.is_closed = False
        self._calls = calls
        self._timeout = timeout
        self._window = window
        self._called = function
        self._name = calls.services.dialect.name_of(function) or b":" + shown_name(b"", function).encode()
        self._consumer = Consumer(window)
        self._context = current_context.get()
        self._lock = make_lock("stream_call")
        self._items: deque[Any] = deque()
        self._opening: Future | None = None  # until it is answered
        self._pulls: deque[Future] = deque()  # those that are open, oldest first
        self._error: BaseException | None = None  # raised behind the items that have arrived
        self._connection: ClientConnection | None = None  # on which it was opened
        self._has_told = False  # that it is closed

    @property
    def function(self) -> str:
        return shown_name(self._name).removeprefix(":")

    @property
    def received(self) -> int:
        """How many items have arrived."""
        return self._consumer.received

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the worker call the function."""
        try:
            asyncio.get_running_loop()
            may_wait = False
        except RuntimeError:
            may_wait = True
        # The future is there first: an interrupt behind the call leaves a stream that can be closed.
        future = self._opening = Future()
        self._call(future, Method.STREAM_OPEN, (self.number, self._window, self._called, *args), kwargs, may_wait)

    # Taking items

    def take(self) -> Any:
        """The next item, on a thread that may wait. Raises ``StopIteration`` at the end."""
        if self.is_awaited:
            raise self._two_takers()
        self.is_awaited = True
        try:
            if not self._items:
                self._wait_for_items()
            return self._take(may_wait=True)
        except _NoMore:
            raise StopIteration from None
        except BaseException:
            self.close()
            raise
        finally:
            self.is_awaited = False

    async def take_async(self) -> Any:
        """The next item, in a coroutine. Raises ``StopAsyncIteration`` at the end."""
        if self.is_awaited:
            raise self._two_takers()
        self.is_awaited = True
        try:
            if not self._items:
                await self._await_items()
            return self._take(may_wait=False)
        except _NoMore:
            raise StopAsyncIteration from None
        except BaseException:
            self.close()
            raise
        finally:
            self.is_awaited = False

    def _wait_for_items(self) -> None:
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        while not self._items:
            future = self._next_answer(may_wait=True)
            if not future.done():
                check_may_block("`for` over a stream", "`async for`")
            if not wait_until(future, deadline):
                raise self._timeout_error()
            self._accept(future)

    async def _await_items(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = None if self._timeout is None else loop.time() + self._timeout
        while not self._items:
            future = self._next_answer(may_wait=False)
            if not future.done():
                woken: asyncio.Future[None] = loop.create_future()
                future.add_done_callback(partial(running_inbox().put, woken))
                try:
                    async with asyncio.timeout_at(deadline):
                        await woken
                except TimeoutError:
                    raise self._timeout_error() from None
            self._accept(future)

    def _two_takers(self) -> UsageError:
        return UsageError(
            f"Two threads or tasks ask the stream of {self.function} from {self.worker} for the next item at the same "
            "time. Let one of them iterate, or open a stream for each."
        )

    def _next_answer(self, may_wait: bool) -> Future:
        """The future that the next items come with. Raises the error if it is its turn, and ``_NoMore`` at the end."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._opening is not None and not self._consumer.is_over:
            return self._opening
        self._send_pulls(may_wait)
        if self._consumer.is_over or not self._pulls:
            raise _NoMore
        return self._pulls[0]

    def _accept(self, future: Future) -> None:
        """Take the items of an answer, which is there."""
        is_open = future is self._opening
        if is_open:
            self._opening = None
        elif self._pulls and self._pulls[0] is future:
            self._pulls.popleft()
        try:
            value = future.wait()
        except Exception as error:
            if self.is_closed:
                return  # whoever closed it does not want to know
            if is_open and not isinstance(error, RpcTimeoutError):
                self._consumer.on_closed()  # there is no generator
            raise self._explained(error) from None
        if is_open or self._consumer.is_over:
            return
        if value is None:
            raise self._lost_error(f"{self.worker} does not have it any more, because their connection was lost.")
        is_end, *items = value
        self._consumer.on_answer(len(items), is_end)
        self._items.extend(items)

    def _take(self, may_wait: bool) -> Any:
        try:
            item = self._items.popleft()
        except IndexError:
            raise _NoMore from None  # another thread has closed it
        self._consumer.on_taken()
        self._send_pulls(may_wait)
        return item

    # Calls

    def _send_pulls(self, may_wait: bool) -> None:
        if self._opening is not None:
            return
        for pull in self._consumer.pulls():
            future = Future()
            self._pulls.append(future)
            if self._connection is not None and self._connection.lost:
                # Not on another one, which the stream does not belong to. The items that have arrived come first.
                future.set_exception(explained(ConnectionLostError(f"The connection to {self.worker} was lost.")))
                continue
            self._call(future, Method.STREAM_PULL, (self.number, *pull), {}, may_wait)

    def _call(
        self, future: Future, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any], may_wait: bool
    ) -> None:
        connection = self._connection or self._calls.peers.connections.get(self.worker)
        outer = current_context.set(self._context)
        try:
            if may_wait or (connection is not None and not connection.lost and connection.takes_calls):
                self._send(future, method, args, kwargs)
            else:
                variables, modes = contextvars.copy_context(), (torch.is_grad_enabled(), Autocast.here())
                send = partial(variables.run, self._send_later, modes, future, method, args, kwargs)
                self._calls.send_later(self.worker, future, send)
        finally:
            current_context.reset(outer)

    def _send(self, future: Future, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The call that opens it is like any other. A pull may wait for as long as the program likes.
        timeout = self._timeout if method is Method.STREAM_OPEN else None
        self._calls.call_async(self.worker, method, args, kwargs, timeout, future)
        call = future.call
        if isinstance(call, FutureResponse):
            # For inspection and errors: the program's function.
            call.origin = self._name, *call.origin[1:]
        if self._connection is None:
            self._connection = self._calls.peers.connections.get(self.worker)

    def _send_later(
        self,
        modes: tuple[bool, Autocast],
        future: Future,
        method: Method,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Send it in the modes of the thread that iterates."""
        is_grad_enabled, autocast = modes
        try:
            if self.is_closed:
                raise UsageError(
                    f"The stream of {self.function} from {self.worker} was closed."
                )  # nobody wants to know
            with torch.set_grad_enabled(is_grad_enabled), autocast.on():
                self._send(future, method, args, kwargs)
        except Exception as error:
            future.set_exception(error)
        if self.is_closed:
            self._tell()  # whoever closed it may not have had the connection

    # Errors

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, StopIteration | StopAsyncIteration):
            made = RuntimeError(f"{self.function} raised {type(error).__name__} on {self.worker}.")
            made.__cause__ = error
            return made
        if type(error) is ConnectionLostError and (self._connection is None or self._connection.lost):
            return self._lost_error(str(error), error)
        if isinstance(error, FarpropError) and error.worker is not None:
            error.function = self.function
        return error

    def _lost_error(self, why: str, error: ConnectionLostError | None = None) -> ConnectionLostError:
        made = ConnectionLostError(
            f"The stream of {self.function} from {self.worker} broke off after {self.received} items. {why}"
        )
        made.worker, made.function = self.worker, self.function
        if error is not None:
            made.may_have_run, made.call_id, made.first_failure = error.may_have_run, error.call_id, error.first_failure
        return made

    def _timeout_error(self) -> RpcTimeoutError:
        error = RpcTimeoutError(
            f"{self.worker} has not produced item {self.received} of {self.function} within the timeout of the stream "
            f"({self._timeout:g} s for each item). The stream is closed. Pass a larger timeout, or 0 to disable it."
        )
        error.worker, error.function = self.worker, self.function
        return error

    # The end

    def fail(self, error: BaseException) -> None:
        """Close it; the program gets the error if it asks for more."""
        if not self._consumer.is_over:
            self._error = error
        self.close()

    def close(self) -> None:
        """Want no more items. A second time, it does no harm."""
        self.is_closed = True
        self._items.clear()
        if not self._consumer.is_over:
            self._calls.services.submit(self._tell)
            self._consumer.on_closed()  # behind it: if an interrupt comes between, the finaliser closes it

    def _tell(self) -> None:
        """On a thread of the pool: have the callee close the generator."""
        connection = self._calls.peers.connections.get(self.worker)
        if connection is None or connection is not (self._connection or connection):
            return  # it has closed it when the connection was lost, or it is not open yet
        with self._lock:
            if self._has_told:
                return
            self._has_told = True
        with suppress(FarpropError):
            self._calls.call_async(
                self.worker, Method.STREAM_CLOSE, (self.number,), {}, _CLOSE_SECONDS, Future(), SYSTEM
            )
