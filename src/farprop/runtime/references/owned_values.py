"""The values that this worker owns: the slot of each, and what happens when a value is freed.

A slot is empty until the value is made, like a future. A value may be asked for before the call that makes it has
arrived. Then it has an *early* slot, which the value takes over when the call arrives, and which fails when the call
can't arrive any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from farprop.errors import ReferenceLostError, renewed
from farprop.ids import GlobalId
from farprop.locks import make_lock
from farprop.protocol.references.records import Fork, OwnedValue, Value
from farprop.runtime.references.control_sender import ControlTransport
from farprop.runtime.references.guarded_machine import GuardedMachine
from farprop.runtime.sync import OneShot, awaited_by
from farprop.runtime.thread_pool import check_may_block, pool_of_this_thread

_REMEMBERED = 1000  # far more than the requests of one worker that are read and not run yet
# One for all slots, which are many: it is never held for longer than a few lines.
_lock = make_lock("value_slot")


class ValueSlot:
    """Filled once, with a value or an exception.

    Args:
        maker: The name of the function that makes the value, as it travelled; for inspection.
        site: The line of the program that called for it, as it travelled; for inspection.
    """

    __slots__ = (
        "_callbacks",
        "_traceback",
        "broken_off",
        "created",
        "done",
        "error",
        "maker",
        "site",
        "value",
    )

    def __init__(self, maker: bytes = b"", site: bytes = b"") -> None:
        self.maker = maker
        self.site = site
        self.created = time.monotonic()
        self.done = False
        self.broken_off = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._callbacks: list[Callable[[], None]] = []

    def fill(self, value: Any) -> None:
        """The value is made. Ignored if the slot is filled already."""
        self._finish(value, None)

    def fail(self, error: BaseException) -> None:
        """The value can't be made. Ignored if the slot is filled already."""
        self._finish(None, error)

    def break_off(self, error: BaseException) -> None:
        """As ``fail``, but replaces a value that is there: for its caller, the call that makes it has failed."""
        value = None
        with _lock:
            self.broken_off = True
            done = self.done
            if done:
                # Kept until the lock is free: its finaliser is the user's.
                value, self.value = self.value, None
                self.error, self._traceback = error, None
        del value
        if not done:
            self._finish(None, error)

    def _finish(self, value: Any, error: BaseException | None) -> None:
        with _lock:
            if self.done:
                return
            self.value, self.error, self.done = value, error, True
            self._traceback = None if error is None else error.__traceback__
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def replace(self, old: Any, new: Any) -> None:
        """Replace a value by another one, if it is still there."""
        with _lock:
            if self.value is old:
                self.value = new

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call back once the slot is filled: now, or on the thread that fills it."""
        with _lock:
            if not self.done:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self, timeout: float | None) -> bool:
        """Wait until the slot is filled.

        Args:
            timeout: In seconds; None for no timeout.

        Returns:
            False if the timeout expired first.
        """
        if self.done:
            return True
        check_may_block("Waiting for the value of a reference")
        filled = OneShot()
        self.when_done(filled.set)
        pool = pool_of_this_thread()
        me = threading.get_ident()
        awaited_by[me] = self
        try:
            with nullcontext() if pool is None else pool.blocked():
                return filled.wait() if timeout is None else filled.wait(timeout=timeout)
        finally:
            awaited_by.pop(me, None)

    def get(self) -> Any:
        """The value; raises the exception if there is one. The slot must be filled."""
        value = self.value  # read before the error: ``break_off`` may come between
        if self.error is not None:
            # Its own traceback: otherwise the traceback would grow with every raise.
            raise renewed(self.error).with_traceback(self._traceback)
        return value


class OwnedValues:
    """The slots of this worker's values.

    Args:
        guard: The state machine.
        worker: The name of this worker, for errors.
        transport: Runs work on pool threads, and knows the names of peers.
    """

    def __init__(self, guard: GuardedMachine, worker: str, transport: ControlTransport) -> None:
        self._guard = guard
        self._machine = guard.machine
        self._worker = worker
        self._transport = transport
        self.early_slots: dict[GlobalId, ValueSlot] = {}
        self.given_up: dict[GlobalId, None] = {}  # the last values that were given up, oldest first
        self._own_calls: dict[GlobalId, OwnedValue] = {}  # values that calls to this worker itself will make
        self._freed: deque[OwnedValue] = deque()
        self._release_submitted = False

    def own(self, slot: ValueSlot) -> OwnedValue:
        """A record for a value of this worker. Takes no lock, so finalisers may make references anywhere."""
        value = self._machine.own()
        value.slot = slot
        return value

    def slot(self, value: OwnedValue) -> ValueSlot:
        """The slot of a value, made on first sight. Called under the lock."""
        slot: ValueSlot | None = getattr(value, "slot", None)
        if slot is None:
            value.slot = slot = self.early_slots.pop(value.rref, None) or ValueSlot()
            if value.state is Value.BROKEN:
                slot.fail(self.never_made(value.rref))
        return slot

    def give_up(self, rrefs: Iterable[GlobalId]) -> list[tuple[GlobalId, ValueSlot]]:
        """These values will never be made, unless they exist. Called under the lock.

        Returns:
            The slots that requests wait for in vain, for ``fail_given_up``. A request that was sent before this and
            runs after it must not wait either, so the last of these values are remembered.
        """
        broken: list[tuple[GlobalId, ValueSlot]] = []
        for rref in rrefs:
            if self._machine.find(rref) is None:
                self.given_up[rref] = None
                if len(self.given_up) > _REMEMBERED:
                    del self.given_up[next(iter(self.given_up))]
                slot = self.early_slots.pop(rref, None)
                if slot is not None:
                    broken.append((rref, slot))
        return broken

    def fail_given_up(self, broken: Iterable[tuple[GlobalId, ValueSlot]]) -> None:
        """End the requests that wait for values that ``give_up`` found. Called without the lock."""
        for rref, slot in broken:
            slot.fail(self.never_made(rref))

    def slot_of(self, rref: GlobalId, exists: bool) -> ValueSlot:
        """The slot of a value that another worker asks for. The value may still have to be made.

        Args:
            rref: The value's id.
            exists: Whether the asking worker knows that this one had a record of the value.

        Raises:
            ReferenceLostError: The value was freed, or will never be made.
        """
        slot = self._guard.locked(self._find_slot, rref, exists)
        if slot is None:
            raise ReferenceLostError(
                f"{self._worker} does not have the value of RRef {rref}: it was freed because a worker that held it "
                "died or was taken for dead, or the call that should have made it is lost."
            )
        return slot

    def _find_slot(self, rref: GlobalId, exists: bool) -> ValueSlot | None:
        value = self._machine.find(rref)
        if value is not None:
            return self.slot(value)
        if not exists and rref not in self.given_up and self._machine.may_come(rref):
            return self.early_slots.setdefault(rref, ValueSlot())
        return None

    def make(self, sender: int, creation: Fork, function: bytes, site: bytes) -> OwnedValue | None:
        """A call arrived that makes a value; None if it must not run. Called under the lock."""
        if sender == self._machine.own_rank:
            return self._own_calls.get(creation.rref)
        value = self._machine.make(sender, creation.rref, creation.fork)
        if value is not None:
            slot = self.slot(value)
            slot.maker, slot.site = function, site
        return value

    # Calls of this worker to itself

    def own_call(self, value: OwnedValue) -> Fork:
        """A call to this worker itself is about to make this value."""
        fork = self._machine.new_id()
        self._own_calls[value.rref] = value
        return Fork(self._machine.own_rank, value.rref, fork, exists=False)

    def own_call_ended(self, value: OwnedValue) -> None:
        """That call has ended, or was never sent."""
        self._own_calls.pop(value.rref, None)

    # Values that are never made

    def never_made(self, rref: GlobalId) -> ReferenceLostError:
        creator = self._transport.name_of_rank(rref.created_on)
        return ReferenceLostError(
            f"RRef {rref} was never made on {self._worker}: {creator}, which called for it, died or lost the link, or "
            "called a process that had this worker's place before."
        )

    def on_broken(self, value: OwnedValue) -> None:
        """The machine says that a value will never be made."""
        self._guard.locked(self.slot, value).fail(self.never_made(value.rref))

    def take_early_slots_of(self, creator: int) -> list[ValueSlot]:
        """Forget what a dead worker was to create; returns the slots that are to fail. Called under the lock."""
        for rref in [rref for rref in self.given_up if rref.created_on == creator]:
            del self.given_up[rref]
        return [self.early_slots.pop(rref) for rref in list(self.early_slots) if rref.created_on == creator]

    # Values that are freed

    def on_freed(self, value: OwnedValue) -> None:
        """Let go of a value on a pool thread: its finaliser is the user's, and may take its time."""
        self._freed.append(value)
        if not self._release_submitted:
            self._release_submitted = True
            try:
                self._transport.submit(self._release)
            except BaseException:
                self._release_submitted = False
                raise

    def _release(self) -> None:
        self._release_submitted = False  # first: a value that is added after the loop below needs another job
        try:
            while self._freed:
                self._freed.popleft()
        except IndexError:
            pass  # another thread was faster

    @property
    def all_released(self) -> bool:
        return not self._freed
