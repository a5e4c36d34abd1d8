"""Calls of backward passes to other workers, and the answers to theirs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from farprop.protocol.backward import ROOTS, CreditShare, Target
from farprop.protocol.events import GRADIENTS
from farprop.runtime.autograd.engine import LocalPass
from farprop.runtime.future_call import FutureCall
from farprop.runtime.recorder import recorder
from farprop.runtime.thread_pool import Blocked
from farprop.runtime.timers import TimerHandle
from farprop.wire.dialect import Dialect, EncodeCall
from farprop.wire.message import ANSWER, Gradient, GradientAnswer, GradientPart, Message, Method, encode_gradients

LEAST_SECONDS = 0.001  # the timeout of a call that is made when the time of its pass is over


class PeerCaller(Protocol):
    """The services of a worker that its backward passes use."""

    label: str
    """The worker's name in log lines."""
    rpc_timeout: float | None
    dialect: Dialect
    is_static: bool
    """Whether the workers of the job stay the same."""

    def name_of_rank(self, rank: int) -> str: ...

    def ranks(self) -> list[int]:
        """All workers of the job."""

    def send_method(self, rank: int, method: Method, message: Message, call: FutureCall, system: bool) -> None:
        """Call a method on another worker; raises like any call. ``system`` if it is short and runs no user code."""

    def call_method(self, rank: int, method: Method, message: Message, timeout: float | None, system: bool) -> Message:
        """Call a method on another worker, and wait for the answer."""

    def submit(self, function: Callable[..., None], *args: Any) -> None: ...

    def call_at(self, when: float, callback: Callable[[], None]) -> TimerHandle: ...

    def call_at_lockfree(self, when: float, callback: Callable[[], None]) -> None:
        """As ``call_at``, for finalisers: takes no lock."""

    def blocked(self) -> Blocked: ...

    def suspect(self, rank: int) -> None:
        """Find out whether this worker is alive."""

    def is_dead(self, rank: int) -> bool:
        """Whether this worker is known to be dead, and no other process has its rank."""

    def clean_up(self, rank: int, context_id: int) -> None:
        """Ask another worker to release a context, with the next control batch."""


class CallbackCall(FutureCall):
    """A call whose outcome is passed to a callback, on a thread of the pool."""

    __slots__ = ("_callback",)

    def __init__(self, timeout: float | None, callback: Callable[[Message | None, Exception | None], None]) -> None:
        super().__init__(timeout)
        self._callback = callback

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        self._callback(answer, error)


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


class GradientReply:
    """Collects the gradients and the credit of the answer to gradients."""

    __slots__ = ("_credit", "_gradients", "_parts")

    def __init__(self) -> None:
        self._parts: list[GradientPart] = []
        self._gradients: list[Gradient] = []
        self._credit: CreditShare | None = None

    def add(self, message_id: int, share: CreditShare, gradients: Sequence[Gradient]) -> None:
        """Add the gradients for one of the caller's sends."""
        self._parts.append(GradientPart(message_id, share, len(gradients)))
        self._gradients += gradients

    def add_credit(self, share: CreditShare) -> None:
        """Add credit that returns to the origin, which is the caller."""
        self._credit = share if self._credit is None else self._credit.plus(share)

    def encode(self, encode_call: EncodeCall, local: LocalPass, to: int) -> Message:
        began = time.monotonic() if recorder.is_on else 0.0
        head = GradientAnswer(self._parts, self._credit).pack()
        if local.create_graph:
            message = encode_recorded(encode_call, local, to, head, self._gradients)
        else:
            message = encode_gradients(encode_call, head, self._gradients)
        if began and self._parts:
            record_gradients(local, self._parts, began)
        return message


def encode_recorded(
    encode_call: EncodeCall, local: LocalPass, to: int, head: bytes, gradients: Sequence[Gradient]
) -> Message:
    """Encode gradients of a recorded pass for a worker. The message has a send node, and will have a recv node."""
    tensors: list[torch.Tensor] = []

    def collect(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Message:
        tensors.clear()  # an earlier try may have filled it
        return encode_call(function, args, kwargs, tensors)

    with torch.enable_grad():  # gradients that have to be copied are
        message = encode_gradients(collect, head, gradients)
        local.record(message, to, tensors)
    return message


def record_gradients(local: LocalPass, parts: Sequence[GradientPart], began: float) -> None:
    """Tell who listens that gradients for these messages were encoded."""
    messages = [part.message_id for part in parts]
    recorder.span(GRADIENTS, "encode gradients", began, **local.details, messages=messages)


def survey(peers: PeerCaller, local: LocalPass, head: bytes, deadline: float | None) -> dict[int, frozenset[int]]:
    """Find all sends that the roots reach, asking worker after worker. ``head`` is the pass's.

    Returns:
        Their message ids by worker.
    """
    found: dict[int, set[int]] = {}
    news = local.machine.reach([ROOTS])
    while news:
        asked: dict[int, list[int]] = {}
        for worker, message_id in news:
            message_ids = found.setdefault(worker, set())
            if message_id not in message_ids:
                message_ids.add(message_id)
                asked.setdefault(worker, []).append(message_id)
        news = set()
        for worker, new_ids in asked.items():
            if worker == local.machine.own_rank:
                news |= local.machine.reach(new_ids)
            else:
                timeout = None if deadline is None else max(deadline - time.monotonic(), LEAST_SECONDS)
                flat = ask(peers, worker, Method.SURVEY, timeout, head, *new_ids)
                news |= {Target(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)}
    return {worker: frozenset(message_ids) for worker, message_ids in found.items()}
