"""The runtime's side of references to values of other workers: handles, drops, errors, and waiting for owners."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from farprop.errors import (
    ConnectionLostError,
    FarpropError,
    ReferenceLostError,
    UsageError,
    renewed,
    without_frames,
)
from farprop.locks import make_lock
from farprop.protocol.references.records import DROPPABLE, UNREGISTERED, USABLE, ReturnedFork, User, UserReference
from farprop.runtime.first_failure import explained
from farprop.runtime.references.control_sender import COALESCE_SECONDS, ControlTransport
from farprop.runtime.references.guarded_machine import GuardedMachine

_BORROW_SECONDS = 0.1  # a call that takes more than twice as long keeps the references that it borrowed


class RRefHandle:
    """What the program holds of a value of another worker. When it is collected, the reference is dropped."""

    __slots__ = ("__weakref__", "_references", "record")

    def __init__(self, references: UserReferences, record: UserReference) -> None:
        self._references = references
        self.record = record

    def check(self, use: str) -> None:
        """Raise the reason why the reference can't be used, if there is one; ``use`` names the use, for the error."""
        self._references.check_usable(self.record, use)

    @property
    def is_confirmed(self) -> bool:
        """Whether the owner keeps the value for this reference, or for that of the caller, who lends it."""
        record = self.record
        state = record.state
        # A long call keeps what it has borrowed. Until the owner lists that, the caller's is there, unless it has died.
        return state in (User.CONFIRMED, User.BORROWED) or (
            state is User.ARRIVED and record.info.was_borrowed and not self._references.is_dead(record.parent)
        )

    def __del__(self) -> None:
        record = getattr(self, "record", None)
        if record is None:
            return  # an interrupt came before ``__init__`` was done
        # First: whoever ends the borrowing meanwhile looks at this after the state has changed.
        record.info.collected = True
        if record.state is not User.BORROWED:  # otherwise the answer of the call tells it
            self._references.drop_soon(record)


class HandleWatch(weakref.ref[RRefHandle]):
    """Notes that a handle was collected, by C code alone: an interrupt at the start of ``__del__`` would be all that
    becomes of it.
    """

    __slots__ = ("record",)

    record: UserReference


class ReferenceInfo:
    """What the runtime knows about a user's reference, in ``UserReference.info``."""

    __slots__ = ("callbacks", "collected", "error", "site", "was_borrowed", "watch")

    def __init__(self, site: str = "") -> None:
        self.site = site
        self.error: Exception | None = None  # why remote() failed
        self.callbacks: list[Callable[[], None]] | None = None  # called when the reference is confirmed or void
        self.watch: weakref.ref[RRefHandle] | None = None  # on the program's handle, while there is one
        self.collected = False  # the handle's finaliser has run
        self.was_borrowed = False  # it came in a request


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
        # Borrowed references, in order: those of the time since a timer last ran, and those of the time before.
        self._borrowed: dict[UserReference, None] = {}
        self._borrowed_before: dict[UserReference, None] = {}
        self._borrowing_is_timed = False

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
        self._watch(handle)
        return handle

    def _watch(self, handle: RRefHandle) -> None:
        watch = HandleWatch(handle, self._collected.append)
        watch.record = handle.record
        handle.record.info.watch = watch

    # Borrowed references

    def borrow(self, record: UserReference) -> RRefHandle:
        """As ``hold``, for a reference that came in a request: nothing follows from it until ``end_borrowing``."""
        handle = RRefHandle(self, record)
        record.info.watch = weakref.ref(handle)
        record.info.was_borrowed = True
        self._borrowed[record] = None
        if not self._borrowing_is_timed:
            self._time_borrowing()
        return handle

    def _time_borrowing(self) -> None:
        self._borrowing_is_timed = True
        self._transport.call_at(time.monotonic() + _BORROW_SECONDS, self._on_long_borrowed)

    def end_borrowing(self, records: Sequence[UserReference]) -> list[ReturnedFork]:
        """The call that brought these references is about to be answered.

        Returns:
            Those that the program has dropped. They are gone here, and the caller tells their sender.
        """
        try:
            return self._guard.run(self._end_borrowing, records)
        except BaseException:
            self._guard.run_later(self._keep_all, records)
            raise

    def _end_borrowing(self, records: Sequence[UserReference], by_answer: bool = True) -> list[ReturnedFork]:
        machine = self._machine
        returned: list[ReturnedFork] = []
        for record in records:
            self._borrowed.pop(record, None)
            self._borrowed_before.pop(record, None)
            info = record.info
            handle = None if info.watch is None or info.collected else info.watch()
            if handle is not None:
                if record.state is User.BORROWED:
                    machine.keep(record)
                if type(info.watch) is not HandleWatch:
                    self._watch(handle)
                handle = None
                if info.collected:  # its finaliser may have seen the earlier state
                    self._drop_one(record)
                continue
            back = machine.give_back(record) if by_answer else None
            if back is not None:
                returned.append(back)
            else:
                self._drop_one(record)
        return returned

    def _keep_all(self, records: Sequence[UserReference]) -> None:
        """``end_borrowing`` was interrupted."""
        for record in records:
            if self._machine.users.get(record.fork) is record:
                self._machine.keep(record)
        self._end_borrowing(records, by_answer=False)

    def _on_long_borrowed(self) -> None:
        """The senders of references may die, so a long call must not depend on them: keep what it has borrowed."""
        self._guard.run(self._end_long_borrowing)
        self._borrowing_is_timed = False  # first: one that is borrowed from now on sets the timer itself
        if self._borrowed_before or self._borrowed:
            self._time_borrowing()

    def _end_long_borrowing(self) -> None:
        long, self._borrowed_before, self._borrowed = list(self._borrowed_before), self._borrowed, {}
        self._end_borrowing(long, by_answer=False)

    def is_dead(self, rank: int | None) -> bool:
        return rank in self._machine.dead

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
        error = ReferenceLostError(f"{owner}, which owned {describe(record)}, has died: the value is lost.")
        return explained(error)

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
