"""The workers of the job that this worker knows."""

from __future__ import annotations

import logging
import threading
from typing import Any

import torch.distributed as dist

from farprop.errors import AuthenticationError, UsageError
from farprop.ids import WorkerInfo
from farprop.locks import make_lock
from farprop.protocol.roster import Entry, Identity
from farprop.protocol.signing import Keys
from farprop.runtime import rendezvous

_log = logging.getLogger(__name__)

_JOIN_SECONDS = 20.0


class Membership:
    """The members of the group.

    A static group has a fixed number of workers, and all have joined when ``join`` returns. Workers may join and leave
    a dynamic group at any time, and the store lists its members.
    """

    def __init__(self, store: dist.Store, own: WorkerInfo, world_size: int | None) -> None:
        self.store: Any = store
        self.is_static = world_size is not None
        self.own = own
        self.joined = threading.Event()
        self._by_rank: dict[int, Entry] = {}
        self._infos: dict[str | int, WorkerInfo] = {}  # by name and by rank
        self.entries = {}
        self._places: rendezvous.Places | None = None
        self._users_store: Any = None
        self._lock = make_lock("membership")

    @property
    def entries(self) -> dict[str, Entry]:
        """The entries of the known members, by name."""
        return self._entries

    @entries.setter
    def entries(self, entries: dict[str, Entry]) -> None:
        by_rank: dict[int, Entry] = {}
        infos: dict[str | int, WorkerInfo] = {}
        for entry in entries.values():
            by_rank.setdefault(entry.rank, entry)
            infos[entry.name] = WorkerInfo(entry.name, entry.rank)
            infos.setdefault(entry.rank, infos[entry.name])
        self._entries, self._by_rank, self._infos = entries, by_rank, infos

    def join(self, keys: Keys, own_entry: Entry, seconds: float, look_for: rendezvous.LookFor) -> list[Entry]:
        """Join the group. In a static group this returns when all workers have joined.

        Args:
            keys: sign and verify the values in the store.
            own_entry: the entry of this worker.
            seconds: how long to wait for the others.
            look_for: finds out whether a worker that has the name or the rank of this one is alive.

        Returns:
            The dead workers whose name or rank this one has taken, in a dynamic group.

        Raises:
            RendezvousError: the workers can't form a group, or not all of them have joined in time.
        """
        predecessors: list[Entry] = []
        if self.is_static:
            self.entries = {entry.name: entry for entry in rendezvous.meet(self.store, keys, own_entry, seconds)}
        else:
            places = rendezvous.Places(self.store, keys, own_entry)
            places.enter(look_for, seconds)
            predecessors = places.predecessors
            self.entries = places.members()
            self._places = places
        self.joined.set()
        return predecessors

    def leave(self) -> None:
        """Remove this worker from the store's list, in a dynamic group."""
        places, self._places = self._places, None
        if places is not None:
            places.leave()

    def users_store(self) -> Any:
        """A client of the store for the program. A wait in the agent's own client would block the agent."""
        if self._users_store is None and self.store is not None:
            self._users_store = self.store.clone()
        return self._users_store

    def forget_store(self) -> None:
        """Drop the store. Exceptions may keep this object alive, and must not keep the store's sockets open."""
        self.store = self._users_store = self._places = None

    def find(self, worker: str | int) -> Entry | None:
        """The entry of the worker with this name or rank; None if it is not known."""
        if isinstance(worker, str):
            return self.entries.get(worker)
        return self._by_rank.get(worker)

    def name_of(self, rank: int) -> str:
        """The name of the worker with this rank; a placeholder if it is not known."""
        entry = self.find(rank)
        return f"worker {rank}" if entry is None else entry.name

    def instance_of(self, worker: str) -> str | None:
        """The random id of the process that currently has this name; None if there is none."""
        entry = self.find(worker)
        if entry is None:
            self.refresh()
            entry = self.find(worker)
        return None if entry is None else entry.instance

    def info(self, worker: str | int) -> WorkerInfo:
        """The info of the worker with this name or rank; raises ``UsageError`` if there is none."""
        found = self._infos.get(worker)
        if found is None and not self.joined.is_set():
            # A peer may finish joining a moment before this worker, and call a function that asks for workers.
            self.joined.wait(_JOIN_SECONDS)
            found = self._infos.get(worker)
        if found is None and not self.is_static:
            self.refresh()
            found = self._infos.get(worker)
        if found is None:
            known = ", ".join(sorted(self.entries))
            raise UsageError(f"{self.own.name} could not find destination {worker!r}. Workers of this job: {known}.")
        return found

    def refresh(self) -> None:
        """Read the members from the store, in a dynamic group. If the store is gone, the known members stay."""
        places = self._places
        if places is not None:
            try:
                places.members()
                with self._lock:  # so that no thread replaces the list by one that it has made earlier
                    self.entries = places.listed()
            except RuntimeError as error:
                _log.info("%s can't ask the store who is there: %s", self.own.label, error)

    def refresh_if_grown(self) -> None:
        """Read the members if one may have joined, in a dynamic group. Otherwise this takes one request."""
        places = self._places
        try:
            grown = places is not None and places.may_have_grown()
        except RuntimeError as error:
            _log.debug("%s can't ask the store whether somebody has joined: %s", self.own.label, error)
            return
        if grown:
            self.refresh()

    def has_left(self, instance: str) -> bool:
        """Whether a worker is known to have left the group itself, in a dynamic group."""
        places = self._places
        return places is not None and places.has_left(instance)

    def was_replaced(self, instance: str) -> bool:
        """Whether another worker is known to have found this one dead and taken its place, in a dynamic group."""
        places = self._places
        return places is not None and places.was_replaced(instance)

    def infos(self) -> list[WorkerInfo]:
        self.refresh()
        return [info for key, info in self._infos.items() if isinstance(key, str)]

    def check(self, peer: Identity) -> None:
        """Raise if an authenticated peer is not in this group. Before this worker has joined, every peer passes."""
        # In this order: this worker may finish joining during the check.
        if not self.joined.is_set():
            return
        known = self.entries.get(peer.name)
        if self.is_static:
            is_known = known is not None and known.identity == peer
        else:
            # Workers may join at any time, but a known instance must have its known identity.
            is_known = all(entry.identity == peer for entry in self.entries.values() if entry.instance == peer.instance)
        if not is_known:
            raise AuthenticationError(
                f"{peer.name}, rank {peer.rank}, knows the secret but is not a worker of this group, or not of this "
                "start of it"
            )
