"""The call behind ``remote()``: its answer says that the owner counts the new reference."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from farprop.protocol.references.records import OwnedValue, UserReference
from farprop.runtime.futures import Future
from farprop.runtime.links import FutureCall
from farprop.runtime.profiling import Session
from farprop.runtime.references import ReferenceSpace, creation_error
from farprop.wire.dialect import Dialect
from farprop.wire.frames import ANSWER, Frame

# One for all calls: it is held for two lines.
_lock = threading.Lock()


class ProfiledCreation:
    """What a profile needs to know of a ``remote()``."""

    __slots__ = ("began", "key", "own_id", "session")

    def __init__(self, session: Session, key: str, own_id: int) -> None:
        self.session = session
        self.key = key
        self.own_id = own_id
        self.began = time.perf_counter()


class CreationCall(FutureCall):
    """``keep`` is what has to live until the call has ended."""

    __slots__ = ("_dialect", "_done", "_error", "_future", "_profile", "_space", "keep", "quick", "subject")

    def __init__(
        self,
        timeout: float,
        space: ReferenceSpace,
        subject: UserReference | OwnedValue,
        keep: Any,
        profile: ProfiledCreation | None,
        dialect: Dialect,
    ) -> None:
        self.timeout = timeout
        # A value of this worker may be freed with the call, and its finaliser is the user's.
        self.quick = isinstance(subject, UserReference)
        self.subject = subject
        self.keep = keep
        self._space = space
        self._profile = profile
        self._dialect = dialect
        self._done = False
        self._error: Exception | None = None
        self._future: Future | None = None

    def finish(self, frame: Frame | None, error: Exception | None) -> None:
        remote = None
        if frame is not None and frame.kind == ANSWER:
            if self._profile is not None:
                _, remote = self._dialect.decode_value(frame.meta, frame.buffers, frame.flags)
        elif frame is not None:
            error = self._dialect.decode_failure(frame.meta)
        if self._profile is not None:
            profile = self._profile
            profile.session.add_call(profile.key, profile.began, profile.own_id, remote)
        if error is None:
            self._end(None, self._space.created)
        else:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self._end(error, lambda record: self._space.creation_failed(record, error))

    def _end(self, error: Exception | None, tell: Callable[[UserReference], None]) -> None:
        subject = self.subject
        if isinstance(subject, UserReference):
            tell(subject)
        else:
            self._space.own_call_ended(subject)
            if error is not None:
                subject.cell.break_off(creation_error("this worker", error))
        self.keep = None
        with _lock:
            self._done = True
            self._error = error
            future = self._future
        if future is not None:
            self._space.submit(self._complete, future)  # its callbacks are the user's

    def future(self) -> Future:
        """Done when the owner has answered."""
        with _lock:
            if self._future is not None:
                return self._future
            future = self._future = Future()
            done = self._done
        if done:
            self._complete(future)
        return future

    def _complete(self, future: Future) -> None:
        if self._error is None:
            future.set_result(None)
        else:
            future.set_exception(self._error)
