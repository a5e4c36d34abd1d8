"""The runtime's side of references to values of other workers: handles, drops, errors, and waiting for owners."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable

from farprop.errors import (
    ConnectionLostError,
    FarpropError,
    ReferenceLostError,
    UsageError,
    renewed,
    without_frames,
)
from farprop.locks import make_lock
from farprop.protocol.references.records import DROPPABLE, UNREGISTERED, USABLE, User, UserReference
from farprop.runtime.references.control_sender import COALESCE_SECONDS, ControlTransport
from farprop.runtime.references.guarded_machine import GuardedMachine


class RRefHandle:
    """What the program holds of a value of another worker. When it is collected, the reference is dropped."""

    __slots__ = ("__weakref__", "_references", "record")

    def __init__(self, references: UserReferences, record: UserReference) -> None:
        self._references = references
        self.record = record

    def check(self, use: str) -> None:
        """Raise the reason why the reference can't be used, if there is one; ``use`` names the use, for the error."""
        self._references.check_usable(self.record, use)

    def __del__(self) -> None:
        self._references.drop_soon(self.record)


class HandleWatch(weakref.ref[RRefHandle]):
    """Notes that a handle was collected, by C code alone: an interrupt at the start of ``__del__`` would be all that
    becomes of it.
    """

    __slots__ = ("record",)

    record: UserReference


class ReferenceInfo:
    """What the runtime knows about a user's reference, in ``UserReference.info``."""

    __slots__ = ("callbacks", "error", "site", "watch")

    def __init__(self, site: str = "") -> None:
        self.site = site
        self.error: Exception | None = None  # why remote() failed
        self.callbacks: list[Callable[[], None]] | None = None  # called when the reference is confirmed or void
        self.watch: HandleWatch | None = None  # on the program's handle, while there is one


class UserReferences:
    """This worker's references to values of others.

    Args:
        guard: The state machine.
        transport: Wakes the loop, and knows the names of peers.
    """

    def __init__(self, guard: GuardedMachine, transport: ControlTransport) -> None:
        self._guard = guard
        self._machine = guard.machine
        self._transport = transport
        self._to_drop: deque[UserReference] = deque()
        self._collected: deque[HandleWatch] = deque()  # all of their references, in case one was not queued
        self._drop_requested = False  # a timer is set

    # remote()

    def prepare(self, owner: int, site: str) -> RRefHandle:
        """A handle for ``create``; ``site`` is the line of the program, for inspection."""
        record = self._machine.prepare_reference(owner)
        record.info = ReferenceInfo(site)
        return self.hold(record)

    def create(self, record: UserReference) -> None:
        """``remote()`` is about to call another worker. Somebody holds the handle, so an interrupt leaks nothing."""
        self._guard.run(self._machine.add_reference, record)

    def created(self, record: UserReference) -> None:
        """The owner has answered the call that makes the value."""
        self._guard.run(self._machine.made, record)

    def creation_failed(self, record: UserReference, error: Exception, sent: bool) -> None:
        """The call that makes the value has no answer, so every use of the reference raises.

        Args:
            record: The reference.
            error: Why there is no answer.
            sent: The call may have reached the owner.
        """
        record.info.error = creation_error(self._transport.name_of_rank(record.owner), error)
        if sent:
            self._guard.run(self._machine.unanswered, record, isinstance(error, ConnectionLostError))
        else:
            self._guard.run(self._machine.unsent, record)

    def abandon(self, record: UserReference, sent: bool) -> None:
        """``remote()`` raises: the program never gets the reference. ``sent``: the call may have left."""

        def give_up() -> None:
            if sent:
                self._machine.unanswered(record, lost=True)
            else:
                self._machine.unsent(record)
            self._machine.drop(record)

        self._guard.run(give_up)

    # Handles

    def hold(self, record: UserReference) -> RRefHandle:
        """A handle for the program. The reference is dropped when the handle is collected."""
        handle = RRefHandle(self, record)
        watch = HandleWatch(handle, self._collected.append)
        watch.record = record
        record.info.watch = watch
        return handle

    def check_usable(self, record: UserReference, use: str) -> None:
        """Raise the reason why a reference can't be used, if there is one; ``use`` names the use, for the error."""
        if record.state in USABLE:
            return
        owner = self._transport.name_of_rank(record.owner)
        if record.state not in (User.DOUBTFUL, User.VOID):
            raise UsageError(f"{describe(record)} has been deleted. Cannot call {use} after deletion.")
        if record.owner in self._machine.dead:
            raise self._lost_with_owner(record)
        if record.info.error is not None:
            raise renewed(record.info.error)
        raise ReferenceLostError(
            f"{describe(record)} is of no use: {owner} does not have the value any more, because a worker that held "
            "it for this one died, or the message that brought it was given up as lost."
        )

    def _lost_with_owner(self, record: UserReference) -> ReferenceLostError:
        owner = self._transport.name_of_rank(record.owner)
        return ReferenceLostError(f"{owner}, which owned {describe(record)}, has died: the value is lost.")

    def owner_replaced(self, rank: int) -> None:
        """Note why the references to the values of a dead worker are of no use. The caller holds the lock."""
        for record in self._machine.users.values():
            if record.owner == rank and (info := getattr(record, "info", None)) is not None:
                info.error = info.error or self._lost_with_owner(record)

    # Drops

    def drop_soon(self, record: UserReference) -> None:
        """Queue a reference for the loop to drop. Takes no lock: the garbage collector calls it, in any thread."""
        self._to_drop.append(record)
        if not self._drop_requested:
            self._drop_requested = True
            try:
                self._transport.call_at_lockfree(time.monotonic() + COALESCE_SECONDS, self._drop_queued)
            except BaseException:  # Ctrl-C; the next drop tries again
                self._drop_requested = False
                raise

    def _drop_queued(self) -> None:
        self._drop_requested = False
        self._guard.run(self._drop_now)

    def _drop_now(self) -> None:
        for _ in range(len(self._to_drop)):
            self._drop_one(self._to_drop.popleft())
        for _ in range(len(self._collected)):
            record = self._collected.popleft().record
            record.info.watch = None
            self._drop_one(record)

    def _drop_one(self, record: UserReference) -> None:
        if record.state in DROPPABLE and self._machine.users.get(record.fork) is record:
            self._machine.drop(record)

    def drop_forgotten(self) -> None:
        """Have references dropped whose finaliser was interrupted."""
        if self._collected and not self._drop_requested:
            self._guard.run_later(self._drop_now)

    def drop_all(self) -> None:
        """The job ends: drop every reference, whether the program can reach it or not."""
        self._guard.run(self._drop_all)

    def _drop_all(self) -> None:
        for record in list(self._machine.users.values()):
            if record.state in DROPPABLE:
                self._machine.drop(record)

    @property
    def none_queued(self) -> bool:
        """No reference waits to be dropped."""
        return not self._to_drop and not self._collected

    # Waiting for owners

    def when_confirmed(self, records: list[UserReference], callback: Callable[[], None]) -> None:
        """Call back once each of these references is confirmed or void: now, or when the last owner has answered."""
        left = [len(records)]
        lock = make_lock("confirmations")

        def one_less() -> None:
            with lock:
                left[0] -= 1
                last = not left[0]
            if last:
                callback()

        for record in records:
            if not self._guard.locked(self._wait_for, record, one_less):
                one_less()

    def _wait_for(self, record: UserReference, callback: Callable[[], None]) -> bool:
        waits = record.state in UNREGISTERED
        if waits:
            record.info.callbacks = [*(record.info.callbacks or ()), callback]
        return waits

    def on_settled(self, record: UserReference) -> None:
        """The machine says that a reference is confirmed or void: those who waited for that go on."""
        info: ReferenceInfo | None = getattr(record, "info", None)
        if info is not None and info.callbacks:
            for callback in self._guard.locked(self._take_callbacks, info):
                callback()

    def _take_callbacks(self, info: ReferenceInfo) -> list[Callable[[], None]]:
        callbacks, info.callbacks = info.callbacks, None
        return callbacks or []


def describe(record: UserReference) -> str:
    """The reference in torch's words."""
    return f"UserRRef(RRefId = {record.rref}, ForkId = {record.fork})"


def creation_error(owner: str, error: Exception) -> Exception:
    """The error of every use of a reference whose ``remote()`` had no answer."""
    kind = type(error) if isinstance(error, FarpropError) else FarpropError
    if isinstance(error, ConnectionLostError):
        kind = ReferenceLostError
    try:
        made = kind(f"RRef creation via rpc.remote() on {owner} failed, and the value may not exist there: {error}")
    except TypeError:
        made = FarpropError(f"RRef creation via rpc.remote() on {owner} failed: {error!r}")
    made.__cause__ = without_frames(error)
    return made
