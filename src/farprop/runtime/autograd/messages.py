"""Calls of backward passes to other workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from farprop.runtime.client_connection import FutureCall
from farprop.runtime.thread_pool import Blocked
from farprop.wire.dialect import Dialect
from farprop.wire.message import ANSWER, Message, Method


class PeerCaller(Protocol):
    """The services of a worker that its backward passes use."""

    label: str
    """The worker's name in log lines."""
    rpc_timeout: float | None
    dialect: Dialect

    def name_of_rank(self, rank: int) -> str: ...

    def ranks(self) -> list[int]:
        """All workers of the job."""

    def send_method(self, rank: int, method: Method, message: Message, call: FutureCall, system: bool) -> None:
        """Call a method on another worker; raises like any call. ``system`` if it is short and runs no user code."""

    def call_method(self, rank: int, method: Method, message: Message, timeout: float | None, system: bool) -> Message:
        """Call a method on another worker, and wait for the answer."""

    def submit(self, function: Callable[..., None], *args: Any) -> None: ...

    def blocked(self) -> Blocked: ...

    def clean_up(self, rank: int, context_id: int) -> None:
        """Ask another worker to release a context, with the next control batch."""


class OneWayCall(FutureCall):
    """A one-way call: only its errors are reported, to ``on_error``, on a thread of the pool."""

    quick = True
    __slots__ = ("_on_error", "_peers")

    def __init__(self, peers: PeerCaller, on_error: Callable[[Exception], None]) -> None:
        super().__init__(peers.rpc_timeout)
        self._peers = peers
        self._on_error = on_error

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        if answer is not None and answer.kind != ANSWER:
            error = self._peers.dialect.decode_failure(answer.payload)
        if error is not None:
            self._peers.submit(self._on_error, error)


def ask(peers: PeerCaller, worker: int, method: Method, timeout: float | None, *args: Any) -> Any:
    """Call one of farprop's short methods, and return its result."""
    dialect = peers.dialect
    answer = peers.call_method(worker, method, dialect.encode_call(None, args, {}), timeout, system=True)
    if answer.kind != ANSWER:
        raise dialect.decode_failure(answer.payload)
    return dialect.decode_value(answer.payload, answer.buffers, answer.flags)
