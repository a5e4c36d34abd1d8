"""The streams of this worker's generators to other workers.

Rules that hold here:

- A stream belongs to the connection that opened it: nobody else can pull or close it, and it ends with the connection.
- A generator that waits because the caller does not take its items occupies no thread. When there is room for items,
  a task of the pool runs it, as it would run a request of the caller; an async generator runs on the asyncio thread.
- A generator runs on one thread at a time, in the context variables of its stream, and is closed once.
- What travels is what was yielded: items are copied or encoded before the generator goes on, which may change them.
- ``Producer`` decides, under the stream's lock. Generators run, and pulls are answered, outside of it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import CoroutineType
from typing import Any, cast

import torch

from farprop.errors import NotExposedError, OverloadedError, UsageError
from farprop.ids import WorkerInfo
from farprop.locks import make_lock
from farprop.protocol.streams import Action, Answer, Close, Fail, Producer, Run, StreamNumbers
from farprop.runtime.async_results import Answer as AnswerWith
from farprop.runtime.async_results import AsyncResults, Deferred
from farprop.runtime.async_results import Fail as FailWith
from farprop.runtime.call_modes import Autocast
from farprop.runtime.coroutine_steps import in_steps
from farprop.runtime.request_queue import Request
from farprop.runtime.server import PendingReply
from farprop.runtime.thread_pool import ThreadPool
from farprop.transport.connection import Connection
from farprop.wire import exposed
from farprop.wire.dialect import Dialect
from farprop.wire.fast_codec import ATOMS
from farprop.wire.function_names import shown_name
from farprop.wire.message import Message, Method

_log = logging.getLogger(__name__)

_MOST_STREAMS = 10_000  # of one connection
_SMALL = 4096  # bytes of an item that travels with others
_MOST_PARTS = 16  # of such an item
_END = object()
_LARGE = object()
_get_ident = threading.get_ident


Encode = Callable[[PendingReply, Any], Message]


class ServedStreams:
    """See the module's rules. Its methods are called by requests, on threads of the pool. ``bind`` is called before it
    is used.

    Args:
        threads: run the generators.
        async_results: runs the async ones.
        own: this worker.
        dialect: knows the names of functions.
    """

    def __init__(
        self,
        threads: ThreadPool,
        async_results: AsyncResults,
        own: WorkerInfo,
        dialect: Dialect,
    ) -> None:
        self._uncork: Callable[[], None]
        self._encode: Encode
        self._threads = threads
        self._async_results = async_results
        self._own = own
        self._dialect = dialect
        self._lock = make_lock("served_streams")
        self._by_connection: dict[Connection, dict[int, _ServedStream]] = {}
        self._numbers: dict[Connection, StreamNumbers] = {}
        self._closing: dict[_ServedStream, None] = {}  # their generators' ``finally`` clauses may still run

    def bind(self, uncork: Callable[[], None], encode: Encode) -> None:
        """Set parts of the server: what sends answers that wait for more, and what encodes an item for a caller."""
        self._uncork, self._encode = uncork, encode

    def methods(self) -> dict[Method, Callable[..., Any]]:
        return {Method.STREAM_OPEN: self.open, Method.STREAM_PULL: self.pull, Method.STREAM_CLOSE: self.close_one}

    @property
    def are_closing(self) -> bool:
        """Whether generators are being closed."""
        return bool(self._closing)

    # What callers ask for

    def open(self, caller: int, number: int, window: int, function: Any, /, *args: Any, **kwargs: Any) -> None:
        """Call a function that returns a generator, and let it produce the first items."""
        reply: PendingReply = self._threads.serving[_get_ident()]
        connection = reply.connection
        if self._dialect.restricted:
            function = self._exposed(function)
        name = self._dialect.name_of(function) or b":" + shown_name(b"", function).encode()
        reply.run = name, function, *reply.run[2:]
        with self._lock:
            numbers = self._numbers.setdefault(connection, StreamNumbers())
            if not numbers.may_open(number):
                return  # its caller does not want it any more
            if len(self._by_connection.setdefault(connection, {})) >= _MOST_STREAMS:
                raise OverloadedError(f"{connection.peer} has {_MOST_STREAMS} open streams here. Close some of them.")
        found = function(*args, **kwargs)
        served = PendingReply(connection, reply.flags, reply.call_id, None)
        _, _, started, _, counted_from = reply.run
        served.context, served.run = reply.context, (name, None, started, None, counted_from)
        if isinstance(found, Iterator):
            stream: _ServedStream = _SyncStream(
                self._threads, self._uncork, self._encode, self._on_done, self._own, served, window, found
            )
        elif isinstance(found, AsyncIterator):
            stream = _AsyncStream(self._async_results, self._encode, self._on_done, self._own, served, window, found)
        else:
            raise not_a_generator(name, found)
        stream.key = connection, number
        with self._lock:
            streams = self._by_connection.get(connection)
            is_wanted = streams is not None and number not in streams and self._numbers[connection].may_open(number)
            if streams is not None and is_wanted:
                streams[number] = stream
        if not is_wanted or connection.closed:
            # In this order: whoever closes the streams of a lost connection comes after its end.
            stream.close()
        else:
            stream.open()

    def pull(self, caller: int, number: int, pull: int, allowed: int) -> Any:
        """The next items, as ``(is_end, *items)``; None if there is no such stream, or not on this connection."""
        reply: PendingReply = self._threads.serving[_get_ident()]
        stream = self._by_connection.get(reply.connection, {}).get(number)
        return None if stream is None else stream.pull(pull, allowed, reply)

    def close_one(self, caller: int, number: int) -> None:
        """The caller wants no more items of a stream."""
        reply: PendingReply = self._threads.serving[_get_ident()]
        with self._lock:
            stream = self._by_connection.get(reply.connection, {}).get(number)
            if stream is None and not reply.connection.closed:
                self._numbers.setdefault(reply.connection, StreamNumbers()).on_unknown_close(number)
        if stream is not None:
            self._close(stream)

    def _exposed(self, function: Any) -> Any:
        """The exposed function, which came as such or as its name."""
        name = exposed.name_of(function) or b""
        found = exposed.find(name)
        if found is None:
            raise NotExposedError(
                f"{self._own.name} does not expose {name.decode(errors='replace')[:200]!r}. Decorate it with "
                "@farprop.rpc.expose there, and import its module before the call."
            )
        return found

    # Ends

    def on_connection_lost(self, connection: Connection) -> None:
        """The caller is gone. Does not wait."""
        with self._lock:
            self._numbers.pop(connection, None)
            streams = self._by_connection.pop(connection, {})
        for stream in streams.values():
            self._closing[stream] = None
            self._threads.submit(stream.close)

    def close(self) -> None:
        """This worker shuts down. Does not wait: see ``are_closing``."""
        for connection in list(self._by_connection):
            self.on_connection_lost(connection)

    def _close(self, stream: _ServedStream) -> None:
        self._closing[stream] = None
        stream.close()

    def _on_done(self, stream: _ServedStream) -> None:
        """Nothing is left of a stream; called again, it does no harm."""
        self._closing.pop(stream, None)
        connection, number = stream.key
        with self._lock:
            streams = self._by_connection.get(connection, {})
            if streams.get(number) is stream:
                del streams[number]

    def __len__(self) -> int:
        return sum(map(len, list(self._by_connection.values())))


class _ServedStream:
    """One stream, whatever kind of generator it has.

    Args:
        encode: encodes an item for the caller.
        on_done: called with this stream when nothing is left of it.
        own: this worker.
        served: what inspection shows while the generator runs: the request that opened the stream.
        window: how many items may be produced at first.
    """

    key: tuple[Connection, int]

    def __init__(
        self,
        encode: Encode,
        on_done: Callable[[_ServedStream], None],
        own: WorkerInfo,
        served: PendingReply,
        window: int,
    ) -> None:
        self._encode = encode
        self._on_done = on_done
        self._own = own
        self._served = served
        self._producer = Producer(window)
        self._lock = make_lock("served_stream")
        self._is_closing = False  # its generator's ``finally`` clauses may still run
        self._autocast = Autocast.here()  # the caller's: the request that opens the stream runs in its modes

    def open(self) -> None:
        self._perform(self._locked(self._producer.on_opened))

    def pull(self, number: int, allowed: int, reply: PendingReply) -> Any:
        reply.context = None  # items are encoded already, in the stream's
        parked = _ParkedPull(self._lock)
        actions = self._locked(self._producer.on_pull, number, allowed, parked)
        self._perform(actions)
        if isinstance(parked.outcome, Answer):
            return _value_of(parked.outcome)
        reply.run = self._served.run[0], None, *reply.run[2:]
        return Deferred(parked.subscribe, None)

    def close(self) -> None:
        """Close the generator: now, or as soon as it does not run."""
        self._perform(self._locked(self._producer.on_close))

    def _produced(self, outcome: Any, error: BaseException | None) -> bool:
        """The generator has yielded an item, ended (``_END``), or raised; returns whether it goes on."""
        producer = self._producer
        is_closed = producer.is_closed
        has_ended = error is not None or outcome is _END
        item = None
        if not has_ended and not is_closed:
            # Before the generator goes on: it may change what it has yielded.
            item = _small_copy(outcome)
            try:
                if item is _LARGE:
                    item = self._encode(self._served, outcome)
            except BaseException as raised:
                raised.add_note(f"{self._own.name} could not encode an item, a {type(outcome).__name__}.")
                error = raised
        with self._lock:
            if error is not None:
                actions = producer.on_error(error)
            elif has_ended:
                actions = producer.on_end()
            else:
                actions = producer.on_item(item, type(item) is not Message)
            goes_on = producer.is_running
        if error is not None and not has_ended:
            self._is_closing = True
            self._close_generator()
        if error is not None and not is_closed:
            exc_info = error if _log.isEnabledFor(logging.DEBUG) else None
            shown, peer = shown_name(self._served.run[0]).removeprefix(":"), self._served.connection.peer
            _log.warning("%s: %s, streamed to %s, raised %r", self._own.label, shown, peer, error, exc_info=exc_info)
        self._perform(actions)
        return goes_on

    def _locked(self, event: Callable[..., list[Action]], *args: Any) -> list[Action]:
        with self._lock:
            return event(*args)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Run):
                self._run()
            elif isinstance(action, Close):
                self._is_closing = True
                self._close_generator()
            else:
                action.pull.settle(action)
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._producer.is_done and not self._is_closing:
            self._on_done(self)

    def _run(self) -> None:
        raise NotImplementedError

    def _close_generator(self) -> None:
        """Close it, and call ``_on_generator_closed`` then. Does not wait."""
        raise NotImplementedError

    def _on_generator_closed(self) -> None:
        self._is_closing = False
        self._end_if_done()

    def _note_failed_close(self, error: BaseException) -> None:
        shown = shown_name(self._served.run[0]).removeprefix(":")
        _log.warning("%s: closing the stream of %s raised %r", self._own.label, shown, error)


class _SyncStream(_ServedStream):
    def __init__(
        self,
        threads: ThreadPool,
        uncork: Callable[[], None],
        encode: Encode,
        on_done: Callable[[_ServedStream], None],
        own: WorkerInfo,
        served: PendingReply,
        window: int,
        generator: Iterator[Any],
    ) -> None:
        super().__init__(encode, on_done, own, served, window)
        self._threads = threads
        self._uncork = uncork
        self._generator = generator
        self._variables = contextvars.copy_context()  # with the autograd context of the request
        self._is_grad_enabled = torch.is_grad_enabled()

    def _run(self) -> None:
        request: Request = (self._served.connection.rank, self._produce, ())
        if self._threads.is_polling_thread():
            self._threads.push_request(request)  # it looks at the queue next, or the watcher replaces it
        else:
            self._threads.submit_request(request)

    def _produce(self) -> None:
        """Run the generator while there is room for items, and nothing else waits for a thread."""
        self._uncork()  # answers that wait for more, because this was queued behind them
        while self._produced(*self._step()):
            if self._served.connection.closed:
                self.close()  # nobody may have noticed: a worker's connection to itself is not watched
            if self._threads.requests:
                self._run()
                return

    def _step(self) -> tuple[Any, BaseException | None]:
        if self._producer.is_closed:
            return None, None  # an item that nobody gets
        return self._inside(lambda: next(self._generator, _END))

    def _inside(self, step: Callable[[], Any]) -> tuple[Any, BaseException | None]:
        """Run a step of the generator as on a thread of its own. Torch's grad mode belongs to threads."""
        me = _get_ident()
        outer = torch.is_grad_enabled()
        if outer != self._is_grad_enabled:
            torch.set_grad_enabled(self._is_grad_enabled)
        self._threads.serving[me] = self._served
        try:
            if not self._autocast.dtypes:
                return self._variables.run(step), None
            with self._autocast.on():
                return self._variables.run(step), None
        except BaseException as error:
            return None, error
        finally:
            self._threads.serving.pop(me, None)
            self._is_grad_enabled = torch.is_grad_enabled()
            if outer != self._is_grad_enabled:
                torch.set_grad_enabled(outer)

    def _close_generator(self) -> None:
        self._threads.submit(self._close_now)

    def _close_now(self) -> None:
        close = getattr(self._generator, "close", None)  # other iterators have none
        if close is not None:
            _, error = self._inside(close)
            if error is not None:
                self._note_failed_close(error)
        self._on_generator_closed()


class _AsyncStream(_ServedStream):
    def __init__(
        self,
        async_results: AsyncResults,
        encode: Encode,
        on_done: Callable[[_ServedStream], None],
        own: WorkerInfo,
        served: PendingReply,
        window: int,
        generator: AsyncIterator[Any],
    ) -> None:
        super().__init__(encode, on_done, own, served, window)
        self._async_results = async_results
        self._generator = generator
        self._has_begun = False
        self._loop: asyncio.AbstractEventLoop | None = None  # once it runs there
        self._wakes: asyncio.Event
        self._task: asyncio.Task[Any] | None = None  # while it is inside of the generator

    def _run(self) -> None:
        self._wake()

    def close(self) -> None:
        super().close()
        self._wake()

    def _close_generator(self) -> None:
        self._wake()

    def _wake(self) -> None:
        """Have the coroutine look what is to do."""
        with self._lock:
            loop, begins = self._loop, not self._has_begun
            self._has_begun = True
        if begins:
            driver = cast("CoroutineType[Any, Any, None]", self._drive())
            self._async_results.on_unfinished(
                driver, self._served.context, lambda _: None, self._note_failed_close, self._served
            )
        elif loop is not None:
            try:
                loop.call_soon_threadsafe(self._on_woken)
            except RuntimeError:
                pass  # the worker has shut down

    def _on_woken(self) -> None:
        self._wakes.set()
        if self._task is not None and self._producer.is_closed:
            self._task.cancel()

    async def _drive(self) -> None:
        """Run the generator whenever there is room for items, and close it in the end."""
        self._wakes = asyncio.Event()
        with self._lock:
            self._loop = asyncio.get_running_loop()
        try:
            while not self._producer.has_ended:
                if self._producer.is_running:
                    while self._produced(*await self._inside()):
                        pass
                else:
                    await self._wakes.wait()
                    self._wakes.clear()
        except asyncio.CancelledError:
            super().close()  # the worker shuts down
        finally:
            close: Callable[[], Awaitable[None]] | None = getattr(self._generator, "aclose", None)
            try:
                if close is not None:
                    await self._step(close)
            finally:
                self._on_generator_closed()

    def _is_closed(self) -> bool:
        return self._producer.is_closed

    async def _step(self, function: Callable[[], Awaitable[Any]]) -> Any:
        if not self._autocast.dtypes:
            return await function()

        async def awaiting() -> Any:
            return await function()

        return await in_steps(self._autocast.on, awaiting())

    async def _inside(self) -> tuple[Any, BaseException | None]:
        """A step of the generator. A close cancels it."""
        if self._is_closed():
            return None, None
        task = self._task = asyncio.current_task()
        try:
            return await self._step(self._generator.__anext__), None
        except StopAsyncIteration:
            return _END, None
        except asyncio.CancelledError as error:
            if task is not None and self._is_closed():
                task.uncancel()
                return None, None  # an item that nobody gets
            return None, error
        except BaseException as error:
            return None, error
        finally:
            self._task = None


class _ParkedPull:
    """A pull that waits for items. ``settle`` and ``subscribe`` are called once each, in any order."""

    __slots__ = ("_answer", "_fail", "_lock", "outcome")

    def __init__(self, lock: threading.Lock) -> None:
        self.outcome: Answer | Fail | None = None
        self._lock = lock
        self._answer: AnswerWith | None = None
        self._fail: FailWith

    def settle(self, outcome: Answer | Fail) -> None:
        with self._lock:
            self.outcome = outcome
            answer = self._answer
        if answer is not None:
            self._end(answer, outcome)

    def subscribe(self, answer: AnswerWith, fail: FailWith) -> None:
        with self._lock:
            self._answer, self._fail = answer, fail
            outcome = self.outcome
        if outcome is not None:
            self._end(answer, outcome)

    def _end(self, answer: AnswerWith, outcome: Answer | Fail) -> None:
        if isinstance(outcome, Answer):
            answer(_value_of(outcome))
        else:
            self._fail(outcome.error)
            outcome.error.__traceback__ = None  # a cycle through its frames


def _value_of(answer: Answer) -> Any:
    """What travels: an item that was encoded alone, or ``(is_end, *items)``."""
    if answer.items and type(answer.items[0]) is Message:
        return answer.items[0]
    return answer.is_end, *answer.items


def _small_copy(item: Any, depth: int = 2) -> Any:
    """A copy of an item that may travel with others, or ``_LARGE``: it is surely encoded, in little room, without a
    graph.
    """
    kind = type(item)
    if kind in ATOMS:
        return item if kind not in (str, bytes) or len(item) <= _SMALL else _LARGE
    if kind is torch.Tensor:
        is_small = not item.requires_grad and item.is_cpu and item.layout is torch.strided and item.nbytes <= _SMALL
        return item.clone() if is_small else _LARGE
    if not depth or kind not in (tuple, list, dict) or len(item) > _MOST_PARTS:
        return _LARGE
    parts = [_small_copy(part, depth - 1) for part in ([*item, *item.values()] if kind is dict else item)]
    if any(part is _LARGE for part in parts):
        return _LARGE
    return dict(zip(parts[: len(item)], parts[len(item) :], strict=True)) if kind is dict else kind(parts)


def not_a_generator(name: bytes, value: Any) -> UsageError:
    """The error of a function that was called for a stream and returned no generator."""
    shown = shown_name(name).removeprefix(":")
    if isinstance(value, CoroutineType):
        value.close()
        what = "is an async def function without yield: it has one result"
    else:
        what = f"returned a {type(value).__name__}, not a generator"
    return UsageError(
        f"rpc.stream can't iterate over the result of {shown}, which {what}. Write it with yield, return an iterator, "
        "or call it with rpc_sync."
    )
