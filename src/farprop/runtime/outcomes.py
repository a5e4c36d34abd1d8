"""What becomes of the answer to a call: a value, an exception, a future that is done."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from farprop._torch import set_result
from farprop.runtime.gradients.contexts import Context, take_head
from farprop.runtime.links import FutureCall
from farprop.runtime.profiling import Session
from farprop.wire.codec import decode_with
from farprop.wire.dialect import Dialect
from farprop.wire.frames import ANSWER, CONTEXT, Frame


class Outcomes:
    """Reads answers."""

    __slots__ = ("_decode_failure", "_decode_value")

    def __init__(self, dialect: Dialect) -> None:
        self._decode_value = dialect.decode_value
        self._decode_failure = dialect.decode_failure

    def value_of(self, frame: Frame, context: Context | None = None, sender: int = -1) -> Any:
        """What a call returns for this answer, or raises. ``context`` is the one that the call was made in."""
        if frame.flags & CONTEXT and frame.kind == ANSWER:
            head = take_head(frame)
            if context is not None:
                return context.receive(sender, head, self._decoded, frame)
        return self._decoded(frame)

    def _decoded(self, frame: Frame) -> Any:
        if frame.kind == ANSWER:
            if frame.arrivals is not None:
                return decode_with(frame.arrivals.items, self._decode_value, frame.meta, frame.buffers, frame.flags)
            return self._decode_value(frame.meta, frame.buffers, frame.flags)
        raise self._decode_failure(frame.meta)


ValueOf = Callable[[Frame, Context | None, int], Any]


class TorchCall(FutureCall):
    """A call whose outcome completes a future; its callbacks run where it is completed."""

    __slots__ = ("_value_of", "context", "future", "sender")

    def __init__(self, timeout: float, future: torch.futures.Future[Any], value_of: ValueOf) -> None:
        self.timeout = timeout
        self._value_of = value_of
        self.future = future
        self.context: Context | None = None
        self.sender = -1

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        if frame is not None:
            try:
                value = self._value_of(frame, self.context, self.sender)
            except Exception as raised:
                error = raised
            else:
                set_result(self.future, value)
                return
        assert error is not None
        self.future.set_exception(error)


class ProfiledCall(TorchCall):
    """The same under a profile: what the callee recorded goes into it before the future is done."""

    __slots__ = ("_began", "_key", "_own_id", "_session")

    def __init__(
        self,
        timeout: float,
        future: torch.futures.Future[Any],
        value_of: ValueOf,
        session: Session,
        key: str,
        own_id: int,
    ) -> None:
        super().__init__(timeout, future, value_of)
        self._session = session
        self._key = key
        self._own_id = own_id
        self._began = time.perf_counter()

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        value = remote = None
        if frame is not None:
            try:
                value, remote = self._value_of(frame, self.context, self.sender)
            except Exception as raised:
                error = raised
        self._session.add_call(self._key, self._began, self._own_id, remote)
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)
