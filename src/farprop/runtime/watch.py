"""Who joins, leaves and dies: tells the callbacks of the program, and ends the job if the program wants that.

Rules that hold here:

- Nothing is watched before a callback is registered, and nothing after ``close``.
- An instance is told to have joined at most once, and to have ended at most once.
- Callbacks run on a thread of the pool, one at a time, in the order of the events, and under no lock.
- Tables are not changed, but replaced: an interrupt can't come between assignments, and readers need no lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

from farprop.errors import UsageError
from farprop.ids import WorkerInfo
from farprop.locks import make_lock
from farprop.runtime.membership import Membership

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_REPLACED = "Another process has taken its place: it is dead."


class Event(Enum):
    """What a callback is registered for."""

    JOIN = "join"
    LEAVE = "leave"
    FAILURE = "failure"


class CallbackHandle:
    """A registered callback.

    Args:
        watch: who calls it.
        event: what it is registered for.
        callback: the callback.
        instance: whose failure it is registered for; empty for all workers.
    """

    __slots__ = ("_watch", "callback", "event", "instance", "removed")

    def __init__(self, watch: Watch, event: Event, callback: Callable[..., Any], instance: str = "") -> None:
        self._watch = watch
        self.event = event
        self.callback = callback
        self.instance = instance
        self.removed = False

    def remove(self) -> None:
        """Have it not called any more. It may still run if it runs now. A second time does no harm."""
        self.removed = True
        self._watch.drop_removed()


_Due = tuple[CallbackHandle, tuple[Any, ...]]  # who is to be told, and what


class Watch:
    """See the module's rules.

    Args:
        membership: the workers of the job.
        is_dead: whether the instance with a rank is known to be dead.
        submit: runs a function on a thread of the pool.
        call_at: calls a function at a time of the monotonic clock.
        look: ``look(rank)`` keeps a connection to a worker, and finds out whether it is alive if it is lost.
    """

    def __init__(
        self,
        membership: Membership,
        is_dead: Callable[[int, str], bool],
        submit: Callable[..., None],
        call_at: Callable[[float, Callable[[], None]], object],
        look: Callable[[int], None],
    ) -> None:
        self._membership = membership
        self._is_dead = is_dead
        self._submit = submit
        self._call_at = call_at
        self._look = look
        self._lock = make_lock("watch")
        self._present: dict[str, WorkerInfo] = {}  # other workers, by instance
        self._seen: set[str] = set()  # all instances that are or were there
        self._handles: list[CallbackHandle] = []
        self._due: list[_Due] = []
        self._failure: tuple[WorkerInfo, str] | None = None  # who has died, and why
        self._end_job: Callable[[WorkerInfo, str], None] | None = None
        self._is_active = False  # the tables above are kept up to date
        self._is_polling = False
        self._is_telling = False
        self._closed = False

    # Registering

    def on_join(self, callback: Callable[[WorkerInfo], Any]) -> CallbackHandle:
        return self._add(CallbackHandle(self, Event.JOIN, callback))

    def on_leave(self, callback: Callable[[WorkerInfo], Any]) -> CallbackHandle:
        return self._add(CallbackHandle(self, Event.LEAVE, callback))

    def on_failure(self, worker: str | int, callback: Callable[[WorkerInfo, str], Any]) -> CallbackHandle:
        """Call ``callback(info, reason)`` when a worker has died, or soon if it is dead already."""
        info = self._membership.info(worker)
        if info == self._membership.own:
            raise UsageError(f"{info.name} can't be told of its own failure.")
        entry = self._membership.find(info.name)
        if entry is None:
            raise UsageError(f"{info.name} has left the group.")
        return self._add(CallbackHandle(self, Event.FAILURE, callback, entry.instance), info)

    def end_job_on_failure(self, end_job: Callable[[WorkerInfo, str], None]) -> None:
        """Call ``end_job(info, reason)`` on a thread of the pool when a worker has died. It may be called again."""
        self._end_job = end_job
        self._update()
        self._watch_all()

    def _add(self, handle: CallbackHandle, info: WorkerInfo | None = None) -> CallbackHandle:
        """Register a callback, for the failure of one worker if that is given."""
        # First the earlier callbacks are told what they have to know, and the new one is not.
        self._membership.refresh()
        self._update()
        with self._lock:
            if info is None or handle.instance in self._present:
                self._handles = [*self._handles, handle]
            elif not self._membership.has_left(handle.instance):
                self._due = [*self._due, (handle, (info, "It was dead already."))]
        self._watch_all()
        self._tell_soon()
        return handle

    def drop_removed(self) -> None:
        """Forget the handles that were removed."""
        with self._lock:
            self._handles = [handle for handle in self._handles if not handle.removed]

    # Whom to watch

    def concerned_with(self, rank: int) -> bool:
        """Whether somebody wants to know of the end of the worker with this rank."""
        if not self._is_active or self._closed:
            return False
        watched = {handle.instance for handle in self._handles if handle.event is not Event.JOIN}
        if self._end_job is not None or "" in watched:
            return any(info.id == rank for info in self._present.values())
        return any(info.id == rank and instance in watched for instance, info in self._present.items())

    def _watch_all(self) -> None:
        for info in self._present.values():
            if self.concerned_with(info.id):
                self._look(info.id)
        with self._lock:
            if not self._membership.is_static and not self._is_polling:
                # In this order: an interrupt may leave two timers, but not none.
                self._call_at(time.monotonic() + _POLL_SECONDS, self._poll_soon)
                self._is_polling = True

    def _poll_soon(self) -> None:
        with self._lock:
            self._is_polling = not self._closed and bool(self._handles or self._end_job)
        if self._is_polling:
            self._submit(self._poll)

    def _poll(self) -> None:
        try:
            self._membership.refresh_if_grown()
            self._update()
        finally:
            if not self._closed:
                self._call_at(time.monotonic() + _POLL_SECONDS, self._poll_soon)

    # What has happened

    def met(self, instance: str) -> None:
        """A process has proved that it is a worker of the job. It may have just joined."""
        if self._is_active and not self._closed and instance not in self._seen:
            self._submit(self._look_again)

    def _look_again(self) -> None:
        self._membership.refresh()
        self._update()

    def died(self, rank: int, instance: str | None, reason: str, unless: str = "") -> None:
        """A worker has died, or has left.

        Args:
            rank: its rank.
            instance: its instance; None if it is not known.
            reason: how this worker knows.
            unless: the instance that has the rank now, if it is known.
        """
        if self._is_active and not self._closed:
            self._submit(self._on_death, rank, instance, reason, unless)

    def _on_death(self, rank: int, instance: str | None, reason: str, unless: str) -> None:
        # A worker that has left has told the store before.
        self._membership.refresh()
        self._update()
        with self._lock:
            for found, info in self._present.items():
                if info.id == rank and found != unless and instance in (None, found):
                    self._due = self._due + self._told_of_end(found, info, reason)
                    self._present = {key: other for key, other in self._present.items() if key != found}
                    self._failure = self._failure or (info, reason)
                    break
        self._tell_soon()

    def _update(self) -> None:
        """Compare the members with those that were there before."""
        with self._lock:
            own = self._membership.own.id
            entries = self._membership.entries.values()
            listed = {entry.instance: WorkerInfo(entry.name, entry.rank) for entry in entries if entry.rank != own}
            joined = [
                instance
                for instance, info in listed.items()
                if instance not in self._seen and not self._is_dead(info.id, instance)
            ]
            taken = {listed[instance].name for instance in joined} | {listed[instance].id for instance in joined}
            due, failure, present = self._due, self._failure, dict(self._present)
            for instance, info in self._present.items():
                is_taken = not taken.isdisjoint((info.name, info.id))
                if instance in listed and not is_taken:
                    continue
                # Not to be listed is not enough: a thread that has read the store earlier may set the list later.
                if self._membership.has_left(instance):
                    due = due + self._told_of_end(instance, info, None)
                elif is_taken or self._membership.was_replaced(instance):
                    due = due + self._told_of_end(instance, info, _REPLACED)
                    failure = failure or (info, _REPLACED)
                else:
                    continue
                del present[instance]
            for instance in joined:
                joins = [handle for handle in self._handles if handle.event is Event.JOIN]
                due = due + [(handle, (listed[instance],)) for handle in joins]
            present.update((instance, listed[instance]) for instance in joined)
            seen = self._seen | listed.keys()
            # Assignments alone: they can't be split.
            self._present, self._seen, self._due, self._failure = present, seen, due, failure
            self._is_active = True
        for instance in joined:
            if self.concerned_with(listed[instance].id):
                self._look(listed[instance].id)
        self._tell_soon()

    def _told_of_end(self, instance: str, info: WorkerInfo, reason: str | None) -> list[_Due]:
        """Who is told that a worker has left, or has died for a reason. Called under the lock."""
        told: list[_Due] = []
        for handle in self._handles:
            if handle.event is Event.LEAVE:
                told.append((handle, (info,)))
            elif handle.event is Event.FAILURE and handle.instance == instance and reason is not None:
                told.append((handle, (info, reason)))
        return told

    # Telling

    def _tell_soon(self) -> None:
        if self._due or self._ends_job:
            self._submit(self._tell)

    def _tell(self) -> None:
        """Call the callbacks that are due, on a thread of the pool, where no interrupt comes."""
        if self._ends_job and self._end_job is not None and self._failure is not None:
            self._end_job(*self._failure)  # first: a callback may take long, or end the program
        with self._lock:
            if self._is_telling:
                return
            self._is_telling = True
        while True:
            with self._lock:
                if not self._due or self._closed:
                    self._is_telling = False
                    return
                (handle, args), *self._due = self._due
            if not handle.removed:
                try:
                    handle.callback(*args)
                except BaseException:  # also SystemExit: it would end a thread of the pool, and nothing else
                    _log.exception("%s: an on_%s callback failed", self._membership.own.label, handle.event.value)

    @property
    def _ends_job(self) -> bool:
        return self._failure is not None and self._end_job is not None and not self._closed

    @property
    def has_told(self) -> bool:
        """No callback runs, and none is to be called."""
        return not self._is_telling and (self._closed or not self._due)

    def close(self) -> None:
        """Watch nobody any more, and call nobody."""
        self._closed = True
