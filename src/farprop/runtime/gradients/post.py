"""How passes talk to other workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from farprop.runtime.links import FutureCall
from farprop.wire.codec import Encoded
from farprop.wire.dialect import Dialect
from farprop.wire.frames import ANSWER, Frame


class Post(Protocol):
    """What passes need of their worker."""

    rpc_timeout: float
    dialect: Dialect

    def name_of_rank(self, rank: int) -> str: ...

    def ranks(self) -> list[int]:
        """All workers of the job."""

    def send_own(self, rank: int, name: bytes, encoded: Encoded, call: FutureCall, system: bool) -> None:
        """Call a function of farprop's on another worker; raises like any call. ``system`` if it is short."""

    def call_own(self, rank: int, name: bytes, encoded: Encoded, timeout: float, system: bool) -> Frame:
        """The same, and wait for the answer."""

    def submit(self, function: Callable[..., None], *args: Any) -> None: ...

    def blocked(self) -> Any: ...

    def clean_up(self, rank: int, context_id: int) -> None:
        """Have another worker release a context, in time."""


class Word(FutureCall):
    """A call that only an error is interesting of; ``on_error`` hears of it, on a thread of the pool."""

    quick = True
    __slots__ = ("_on_error", "_post")

    def __init__(self, post: Post, on_error: Callable[[Exception], None] | None) -> None:
        super().__init__(post.rpc_timeout)
        self._post = post
        self._on_error = on_error

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        if frame is not None and frame.kind != ANSWER:
            error = self._post.dialect.decode_failure(frame.meta)
        if error is not None and self._on_error is not None:
            self._post.submit(self._on_error, error)


def ask(post: Post, worker: int, name: bytes, timeout: float, *args: Any) -> Any:
    """Call one of farprop's short functions that return one thing, and wait for it."""
    encoded = post.dialect.encode_call(None, args, {})
    return answer_of(post.dialect, post.call_own(worker, name, encoded, timeout, system=True))[0]


def answer_of(dialect: Dialect, frame: Frame) -> Any:
    """What one of farprop's functions returned by ``encode_call``; raises what it raised."""
    if frame.kind != ANSWER:
        raise dialect.decode_failure(frame.meta)
    return dialect.decode_call(frame.meta, frame.buffers, frame.flags)[0]


def answer(dialect: Dialect, value: Any) -> Encoded:
    """For ``ask``."""
    return dialect.encode_call(None, (value,), {})
