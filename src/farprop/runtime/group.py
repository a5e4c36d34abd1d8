"""The workers of the job, as this one knows them."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import torch.distributed as dist

from farprop.errors import AuthenticationError, ProtocolError, UsageError
from farprop.ids import WorkerInfo
from farprop.protocol.roster import Entry
from farprop.runtime import rendezvous

_log = logging.getLogger("farprop.agent")

_JOIN_SECONDS = 20.0


class Group:
    """A static group has a fixed number of workers, which have all come when ``join`` returns. Of any other, workers
    come and go, and the store says who is there.
    """

    def __init__(self, store: dist.Store, own: WorkerInfo, world_size: int | None) -> None:
        self.store: Any = store
        self.is_static = world_size is not None
        self.own = own
        self.joined = threading.Event()
        self.entries: dict[str, Entry] = {}
        self._place = 0
        self._users_store: Any = None

    def join(self, own_entry: Entry, seconds: float) -> None:
        """Meet the others. Returns when all are there, in a static group; raises if they can't be a group."""
        if self.is_static:
            self.entries = {entry.name: entry for entry in rendezvous.meet(self.store, own_entry, seconds)}
        else:
            self._place = rendezvous.enter(self.store, own_entry)
            self.entries = rendezvous.members(self.store)
        self.joined.set()

    def leave(self, own_entry: Entry) -> bool:
        """Tell the store that this worker is gone; True for the last one of a group that comes and goes."""
        if not self._place:
            return False
        rendezvous.leave(self.store, own_entry, self._place)
        return not rendezvous.members(self.store)

    def users_store(self) -> Any:
        """The store, for the program. Not our own client of it: whoever waits in that keeps this worker out."""
        if self._users_store is None and self.store is not None:
            self._users_store = self.store.clone()
        return self._users_store

    def forget_store(self) -> None:
        """Exceptions may keep this object alive: they must not keep the store's sockets open."""
        self.store = self._users_store = None

    def find(self, worker: str | int) -> Entry | None:
        """The entry of a worker with this name or rank, if it is known already."""
        if isinstance(worker, str):
            return self.entries.get(worker)
        return next((entry for entry in self.entries.values() if entry.rank == worker), None)

    def info(self, worker: str | int) -> WorkerInfo:
        """Who has this name or rank; raises if nobody has."""
        found = self.find(worker)
        if found is None and not self.joined.is_set():
            # A peer that joined a moment before us has called a function here that looks around.
            self.joined.wait(_JOIN_SECONDS)
            found = self.find(worker)
        if found is None and not self.is_static:
            self.refresh()
            found = self.find(worker)
        if found is None:
            known = ", ".join(sorted(self.entries))
            raise UsageError(f"{self.own.name} could not find destination {worker!r}. Workers of this job: {known}.")
        return WorkerInfo(found.name, found.rank)

    def refresh(self) -> None:
        """Ask the store who is there, in a group that comes and goes. If the store is gone, we know what we know."""
        if not self.is_static and self.store is not None:
            try:
                self.entries = rendezvous.members(self.store)
            except RuntimeError as error:
                _log.info("%s can't ask the store who is there: %s", self.own.name, error)

    def infos(self) -> list[WorkerInfo]:
        self.refresh()
        return [WorkerInfo(entry.name, entry.rank) for entry in self.entries.values()]

    def identify(self, identity: bytes) -> tuple[WorkerInfo, str]:
        """Who a peer is that has proved itself, and its instance; refuses one that is not of this group."""
        try:
            name, rank, instance = json.loads(identity)
            peer = WorkerInfo(name, rank)
        except (ValueError, TypeError, UsageError) as error:
            raise ProtocolError(f"a peer's identity makes no sense: {error}") from error
        # In this order: a peer may come while this worker is still joining, and is not known before that.
        if self.joined.is_set() and self.is_static:
            known = self.entries.get(name)
            if known is None or known.instance != instance:
                raise AuthenticationError(f"{name} knows the secret but is not a worker of this group")
        return peer, str(instance)
