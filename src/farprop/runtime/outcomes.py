"""What becomes of the answer to a call: a value, an exception, a future that is done."""

from __future__ import annotations

import time
from typing import Any

import torch

from farprop._torch import set_result
from farprop.runtime.gradients.contexts import Context, take_head
from farprop.runtime.links import FutureCall
from farprop.runtime.profiling import Session
from farprop.wire.codec import decode_value, decode_with
from farprop.wire.failures import decode_failure
from farprop.wire.frames import ANSWER, CONTEXT, Frame


def value_of(frame: Frame, context: Context | None = None, sender: int = -1) -> Any:
    """What a call returns for this answer, or raises. ``context`` is the one that the call was made in."""
    if frame.flags & CONTEXT and frame.kind == ANSWER:
        head = take_head(frame)
        if context is not None:
            return context.receive(sender, head, _decoded, frame)
    return _decoded(frame)


def _decoded(frame: Frame) -> Any:
    if frame.kind == ANSWER:
        if frame.arrivals is not None:
            return decode_with(frame.arrivals.items, decode_value, frame.meta, frame.buffers, frame.flags)
        return decode_value(frame.meta, frame.buffers, frame.flags)
    raise decode_failure(frame.meta)


class TorchCall(FutureCall):
    """A call whose outcome completes a future; its callbacks run where it is completed."""

    __slots__ = ("context", "future", "sender")

    def __init__(self, timeout: float, future: torch.futures.Future[Any]) -> None:
        self.timeout = timeout
        self.future = future
        self.context: Context | None = None
        self.sender = -1

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        if frame is not None:
            try:
                value = value_of(frame, self.context, self.sender)
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
        self, timeout: float, future: torch.futures.Future[Any], session: Session, key: str, own_id: int
    ) -> None:
        super().__init__(timeout, future)
        self._session = session
        self._key = key
        self._own_id = own_id
        self._began = time.perf_counter()

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        value = remote = None
        if frame is not None:
            try:
                value, remote = value_of(frame, self.context, self.sender)
            except Exception as raised:
                error = raised
        self._session.add_call(self._key, self._began, self._own_id, remote)
        if error is None:
            self.future.set_result(value)
        else:
            self.future.set_exception(error)
