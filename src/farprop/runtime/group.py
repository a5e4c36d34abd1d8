"""The workers of the job, as this one knows them."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch.distributed as dist

from farprop.errors import AuthenticationError, UsageError
from farprop.ids import WorkerInfo
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import Keys
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
        self._places: rendezvous.Places | None = None
        self._users_store: Any = None

    def join(self, keys: Keys, own_entry: Entry, seconds: float) -> None:
        """Meet the others. Returns when all are there, in a static group; raises if they can't be a group."""
        if self.is_static:
            self.entries = {entry.name: entry for entry in rendezvous.meet(self.store, keys, own_entry, seconds)}
        else:
            places = rendezvous.Places(self.store, keys, own_entry)
            places.enter()
            self.entries = places.members()
            self._places = places
        self.joined.set()

    def leave(self) -> None:
        """Tell the store that this worker is gone, in a group that comes and goes."""
        places, self._places = self._places, None
        if places is not None:
            places.leave()

    def users_store(self) -> Any:
        """The store, for the program. Not our own client of it: whoever waits in that keeps this worker out."""
        if self._users_store is None and self.store is not None:
            self._users_store = self.store.clone()
        return self._users_store

    def forget_store(self) -> None:
        """Exceptions may keep this object alive: they must not keep the store's sockets open."""
        self.store = self._users_store = self._places = None

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
        places = self._places
        if places is not None:
            try:
                self.entries = places.members()
            except RuntimeError as error:
                _log.info("%s can't ask the store who is there: %s", self.own.name, error)

    def infos(self) -> list[WorkerInfo]:
        self.refresh()
        return [WorkerInfo(entry.name, entry.rank) for entry in self.entries.values()]

    def check(self, peer: Identity) -> None:
        """Refuse a peer that has proved itself and is not of this group. Until we have joined, we can't tell."""
        # In this order: it may join while the peer is looked at.
        if not self.joined.is_set():
            return
        known = self.entries.get(peer.name)
        if self.is_static:
            is_known = known is not None and known.identity == peer
        else:
            # Others come and go; but those who are there are who they are.
            is_known = all(entry.identity == peer for entry in self.entries.values() if entry.instance == peer.instance)
        if not is_known:
            raise AuthenticationError(
                f"{peer.name}, rank {peer.rank}, knows the secret but is not a worker of this group, or not of this "
                "start of it"
            )
