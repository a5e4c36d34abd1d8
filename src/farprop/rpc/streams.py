"""``rpc.stream``: iterate over the items of a generator on another worker, as it produces them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Generic, NoReturn, TypeVar, overload

from farprop.errors import UsageError
from farprop.ids import WorkerInfo
from farprop.protocol.streams import MAX_WINDOW
from farprop.rpc import api
from farprop.rpc.call_arguments import Args, Kwargs, args_of, kwargs_of
from farprop.rpc.constants import UNSET_RPC_TIMEOUT
from farprop.rpc.options import checked_timeout
from farprop.runtime.agent_registry import current_agent
from farprop.runtime.dynamo_disable import uncompiled
from farprop.runtime.stream_calls import StreamCall, StreamCalls

_T_co = TypeVar("_T_co", covariant=True)
_T = TypeVar("_T")

DEFAULT_WINDOW = 16


class Stream(Generic[_T_co]):
    """What ``rpc.stream`` returns: an iterator and an asynchronous iterator over the items of a generator elsewhere.

    It is closed, and with it the generator, at the end of its ``with`` statement, by ``close()``, when an error or an
    interrupt ends the iteration, and when nothing refers to it any more, for example after a ``break``. Its ``finally``
    clauses run then, and nobody waits for them. One thread or task at a time can iterate.

    Args:
        calls: The streams of this worker.
        call: This one.
    """

    __slots__ = ("__weakref__", "_call", "_calls", "_watch")

    def __init__(self, calls: StreamCalls, call: StreamCall) -> None:
        self._calls = calls
        self._call = call
        self._watch = calls.watch(self, call)

    def __iter__(self) -> Iterator[_T_co]:
        return self

    @uncompiled
    def __next__(self) -> _T_co:
        return self._call.take()  # type: ignore[no-any-return]

    def __aiter__(self) -> AsyncIterator[_T_co]:
        return self

    async def __anext__(self) -> _T_co:
        return await self._call.take_async()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the stream, and the generator on the other worker. Returns at once; a second time, it does nothing."""
        self._call.close()

    async def aclose(self) -> None:
        """The same, for asynchronous code."""
        self._call.close()

    def __enter__(self) -> Stream[_T_co]:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> Stream[_T_co]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_watch"):  # otherwise an interrupt came before
            self._calls.on_collected(self._watch)

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{self} can't be sent or copied: it belongs to this worker. Send its items.")

    def __repr__(self) -> str:
        call = self._call
        state = "closed" if call.is_closed else f"{call.received} items received"
        return f"<Stream of {call.function} on {call.worker}: {state}>"


@overload
def stream(
    to: str | int | WorkerInfo,
    func: Callable[..., Iterator[_T] | AsyncIterator[_T]],
    args: Args | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    window: int = DEFAULT_WINDOW,
) -> Stream[_T]: ...


@overload
def stream(
    to: str | int | WorkerInfo,
    func: str,
    args: Args | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    window: int = DEFAULT_WINDOW,
) -> Stream[Any]: ...


@uncompiled
def stream(
    to: str | int | WorkerInfo,
    func: Callable[..., Any] | str,
    args: Args | None = None,
    kwargs: Kwargs | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
    *,
    window: int = DEFAULT_WINDOW,
) -> Stream[Any]:
    """Run a generator function on another worker, and iterate over its items as it yields them.

    ``for item in rpc.stream(...)`` waits for each item; ``async for`` does not block the event loop. The generator runs
    ahead of the loop by ``window`` items, and then waits without a thread. It runs in the autograd context of the call,
    and gradients flow back through its items. A stream is not retried.

    Args:
        to: The worker's name, rank or ``WorkerInfo``.
        func: A generator function or async generator function, or one that returns an iterator. In a restricted job: a
            function that the worker has exposed, or its name.
        args: Positional arguments of ``func``.
        kwargs: Keyword arguments of ``func``.
        timeout: The seconds to wait for each item; 0 disables the timeout. By default the process's default for calls.
        window: How many items that the loop has not taken the generator may have produced, 1 or more.

    Returns:
        The iterator. It raises, behind the items that were produced before: what the generator raised, as the same
        type; ``RpcTimeoutError`` if an item took too long; ``ConnectionLostError`` if the worker is gone;
        ``UsageError`` if ``func`` returned no generator.

    Raises:
        UsageError: This process is not a worker, or there is no such worker.
        TypeError: ``func`` can't be called, ``args`` is no tuple, or ``window`` is no integer.
        ValueError: ``window`` or ``timeout`` is out of range.

    Example:
        ``for batch in rpc.stream("worker1", batches, args=(epoch,)): train(batch)``
    """
    agent = current_agent()
    worker = api._to_worker_info(to).name
    if not callable(func):
        api._check_name(func)
    positional, named = args_of(args), kwargs_of(kwargs)
    if type(window) is not int:
        raise TypeError(f"window is a number of items, not {window!r}.")
    if not 1 <= window <= MAX_WINDOW:
        raise ValueError(f"window is from 1 to {MAX_WINDOW} items, not {window}.")
    calls: StreamCalls | None = getattr(agent, "streams", None)
    if calls is None:
        raise UsageError("This backend has no streams. They are part of farprop's own.")
    seconds = agent.services.rpc_timeout if timeout == UNSET_RPC_TIMEOUT else checked_timeout(timeout)
    # In this order: if an interrupt comes, the finaliser closes what was opened.
    made: Stream[Any] = Stream(calls, calls.new(worker, func, seconds, window))
    try:
        made._call.open(positional, named)
    except BaseException:
        made.close()
        raise
    return made
