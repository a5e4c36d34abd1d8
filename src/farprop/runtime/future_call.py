"""Asynchronous calls, as a connection keeps them until their answers arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from farprop.errors import CallCancelledError, RpcTimeoutError
from farprop.runtime.call_records import CallRecord
from farprop.wire.message import AutogradHead, Message

if TYPE_CHECKING:
    from farprop.runtime.answer_reader import Waiter

# What inspection shows of an asynchronous call: the function's name, flags, autograd head, when and by which thread it
# was made, and for which request of which worker. It does not keep the call's request alive, nor that other one.
Origin = tuple[bytes, int, AutogradHead | None, float, int, tuple[str, int] | None]


class FutureCall:
    """An asynchronous call. ``finish`` is called once with its outcome, on a thread of the pool.

    If ``quick`` is set, the reader calls ``finish`` itself. This is for farprop's own calls, whose ``finish`` is short
    and runs no user code. ``timeout`` is in seconds, or None. ``origin`` is for inspection, once it was sent.
    """

    __slots__ = ("origin", "record", "timeout")

    origin: Origin

    quick = False

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.record: CallRecord | None = None  # while somebody listens to events

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        raise NotImplementedError


class AwaitedCall(FutureCall):
    """An asynchronous call that a thread may wait for (``wait_for``). The ``waiter``, if there is one, finishes it.

    To finish it a second time must do no harm: a waiter that is interrupted may leave it to the pool, too.
    """

    __slots__ = ("waiter",)

    def __init__(self, timeout: float | None) -> None:
        super().__init__(timeout)
        self.waiter: Waiter | None = None


def finish_with(call: FutureCall, outcome: Message | Exception) -> None:
    if isinstance(outcome, Exception):
        call.finish(None, outcome)
    else:
        call.finish(outcome, None)


def finish_pair(pair: list[Any]) -> None:
    # The reader still holds the list. Emptying it here keeps the reader from dropping the last reference to a user's
    # object: a finaliser that makes a call would wait for the reader.
    if pair:
        call, answer = pair
        pair.clear()
        call.finish(answer, None)


def cancelled_error(peer: str, function: str) -> CallCancelledError:
    return CallCancelledError(
        f"The call of {function} on {peer} was cancelled here: by Future.cancel(), or with the asyncio task that "
        "awaited it. If it had begun there, it may still be running."
    )


def timeout_error(peer: str, timeout: float) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"RPC ran for more than set timeout ({timeout * 1000:.0f} ms) without an answer from {peer}. It may still be "
        "running there. Pass a larger timeout to the call, or 0 to disable it."
    )
