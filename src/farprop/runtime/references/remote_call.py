"""The call behind ``remote()``: its answer says that the owner counts the new reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from farprop.errors import CallCancelledError
from farprop.locks import make_lock
from farprop.protocol.references.records import OwnedValue, UserReference
from farprop.runtime.autograd.contexts import Context
from farprop.runtime.client_connection import ClientConnection
from farprop.runtime.future_call import FutureCall
from farprop.runtime.futures import Future
from farprop.runtime.profiling import CallProfile
from farprop.runtime.references.rref_context import RRefContext
from farprop.runtime.references.user_references import RRefHandle, creation_error
from farprop.wire.dialect import Dialect
from farprop.wire.message import ANSWER, Message

# One for all calls: it is held for a few lines.
_lock = make_lock("remote_call")


class RemoteCall(FutureCall):
    """``keep`` is what has to live until the call has ended. ``item`` is what the program gets: the call has it until
    then, so that an interrupt can't lose it.
    """

    __slots__ = (
        "_dialect",
        "_done",
        "_error",
        "_future",
        "_profile",
        "_references",
        "item",
        "keep",
        "quick",
        "sent",
        "subject",
    )

    def __init__(
        self,
        timeout: float | None,
        references: RRefContext,
        item: RRefHandle | OwnedValue,
        keep: Any,
        profile: CallProfile | None,
        dialect: Dialect,
    ) -> None:
        super().__init__(timeout)
        # A value of this worker may be freed with the call, and its finaliser is the user's.
        self.quick = isinstance(item, RRefHandle)
        self.subject: UserReference | OwnedValue = item.record if isinstance(item, RRefHandle) else item
        self.item: RRefHandle | OwnedValue | None = item
        self.keep = keep
        self._references = references
        self._profile = profile
        self._dialect = dialect
        # While it is open: the connection, its id there, and its autograd context. A reference has its call as long as
        # it lives, and must not keep a context that long.
        self.sent: tuple[ClientConnection, int, Context | None] | None = None
        self._done = False
        self._error: Exception | None = None
        self._future: Future | None = None

    def read(self, until: float | None = None) -> None:
        """The loop reads: the answer completes more than the future."""

    def on_sent(self, connection: ClientConnection, call_id: int, context: Context | None) -> None:
        with _lock:
            if not self._done:
                self.sent = connection, call_id, context

    def cancel(self) -> bool:
        sent = self.sent
        if sent is None:
            return False
        connection, call_id, _ = sent
        return connection.cancel(self, call_id)

    def finish(self, answer: Message | None, error: Exception | None) -> None:
        if self._profile is not None:
            self._profile.add(answer)
        if answer is not None and answer.kind != ANSWER:
            error = self._dialect.decode_failure(answer.payload)
        if error is None:
            self._end(None, self._references.users.created)
        else:
            self.fail(error)

    def fail(self, error: Exception, sent: bool = True) -> None:
        """The call got no answer, or a failure. ``sent``: it may have reached the owner."""
        open_call = self.sent
        if type(error) is CallCancelledError and open_call is not None and open_call[2] is not None:
            open_call[2].on_cancelled(self.origin[2])
        self._end(error, lambda record: self._references.users.creation_failed(record, error, sent))

    def _end(self, error: Exception | None, tell: Callable[[UserReference], None]) -> None:
        subject = self.subject
        if isinstance(subject, UserReference):
            tell(subject)
        else:
            self._references.values.own_call_ended(subject)
            if error is not None:
                subject.slot.break_off(creation_error("this worker", error))
        self.keep = None
        with _lock:
            self._done = True
            self._error = error
            self.sent = None
            future = self._future
        if future is None:
            return
        if type(error) is CallCancelledError:
            self._complete(future)  # on the thread of the program that cancels it
        else:
            self._references.submit(self._complete, future)  # its callbacks are the user's

    def future(self) -> Future:
        """Done when the owner has answered."""
        with _lock:
            if self._future is not None:
                return self._future
            future = self._future = Future()
            done = self._done
            if not done:
                future.call = self
        if done:
            self._complete(future)
        return future

    def _complete(self, future: Future) -> None:
        if future.done():
            return  # the call ended twice: an interrupt came the first time
        if self._error is None:
            future.set_result(None)
        elif type(self._error) is CallCancelledError:
            future.set_cancelled(self._error)
        else:
            future.set_exception(self._error)
        future.on_call_ended()
