"""How workers find each other through a c10d store. The store carries JSON; who to trust is settled by the handshake.

A static group (world size known) meets once: everyone publishes an entry, rank 0 publishes the verdict, all go on. In a
dynamic group workers come and go: the store holds a list of entries that is read again when somebody is looked for.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from farprop.errors import RendezvousError
from farprop.protocol.roster import Entry, judge, judge_secrets, verdict_from_json, verdict_to_json

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_GONE = "gone"
MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."


def job_of(store: dist.Store) -> str:
    """A random name that all workers who share this store agree on."""
    return _value(store, "job", secrets.token_hex(16))


def host_of(store: Any) -> str | None:
    """The host that carries a store, as this process was told it; None if no host does, as with a file."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else None


def meet(
    store: dist.Store,
    own: Entry,
    timeout: float,
    call: str = "init_rpc",
    more_time: str = "a larger rpc_timeout in the options",
) -> list[Entry]:
    """Join a static group; returns its workers by rank. Raises on every worker if the group can't be.

    ``call`` is what everybody calls to come here, and ``more_time`` what makes it wait longer: for the error.
    """
    if _value(store, "kind", "static") != "static":
        raise RendezvousError(f"{MIXED} Pass world_size on all workers or on none.")
    _claim(store, f"claim/{own.rank}", own, f"Rank {own.rank} is taken already")
    deadline = time.monotonic() + timeout
    store.set(f"worker/{own.rank}", own.to_json())
    if own.rank == 0:
        entries = [own]
        keys = [f"worker/{rank}" for rank in range(1, own.world_size)]
        problem = None
        if _await(lambda: store.check(keys), deadline):
            entries += [Entry.from_json(store.get(key)) for key in keys]
            problem = judge(entries)
        else:
            problem = _missing(store, own.world_size, timeout, call, more_time)
        store.set("verdict", verdict_to_json(entries, problem))
    elif not _await(lambda: store.check(["verdict"]), deadline + 1.0):
        raise RendezvousError(_missing(store, own.world_size, timeout, call, more_time))
    try:
        return verdict_from_json(store.get("verdict"))
    finally:
        store.add("seen", 1)
        if own.rank == 0:
            # Rank 0 often carries the store: it must not leave before all have read the verdict.
            _await(lambda: store.add("seen", 0) >= own.world_size, min(deadline, time.monotonic() + 10.0) + 1.0)


def enter(store: dist.Store, own: Entry) -> int:
    """Join a dynamic group; returns the place in its list."""
    if _value(store, "kind", "dynamic") != "dynamic":
        raise RendezvousError(f"{MIXED} This group was started with a world_size; pass the same here.")
    _claim(store, f"name/{own.name}", own, f"Worker name {own.name!r} is not unique: it is taken")
    _claim(store, f"id/{own.rank}", own, f"Rank {own.rank} is taken already")
    present = members(store)
    problem = judge_secrets([own, *present.values()])
    if problem is not None:
        _release(store, own)
        raise RendezvousError(problem)
    place = int(store.add("places", 1))
    store.set(f"place/{place}", own.to_json())
    return place


def members(store: dist.Store) -> dict[str, Entry]:
    """Who is in a dynamic group now."""
    found = {}
    for place in range(1, int(store.add("places", 0)) + 1):
        if store.check([f"place/{place}"]):
            text = store.get(f"place/{place}").decode()
            if text != _GONE:
                entry = Entry.from_json(text)
                found[entry.name] = entry
    return found


def leave(store: dist.Store, own: Entry, place: int) -> None:
    store.set(f"place/{place}", _GONE)
    _release(store, own)


def _release(store: dist.Store, own: Entry) -> None:
    for key in (f"name/{own.name}", f"id/{own.rank}"):
        store.delete_key(key)


def _value(store: dist.Store, key: str, value: str) -> str:
    """Set a key if nobody has, and return what it is."""
    found: Any = store.compare_set(key, "", value)
    return found.decode() if isinstance(found, bytes) else str(found)


def _claim(store: dist.Store, key: str, own: Entry, taken: str) -> None:
    holder = _value(store, key, f"{own.instance} by a process on {own.host} (pid {own.pid})")
    instance, _, who = holder.partition(" ")
    if instance != own.instance:
        raise RendezvousError(f"{taken} {who}. Give each worker its own name and rank.")


def _missing(store: dist.Store, world_size: int, timeout: float, call: str, more_time: str) -> str:
    absent = [rank for rank in range(world_size) if not store.check([f"worker/{rank}"])]
    if not absent:
        return f"All {world_size} workers came, but rank 0 did not answer within {timeout:.0f} s."
    ranks = ", ".join(map(str, absent))
    who = f"Rank {ranks} of {world_size} has" if len(absent) == 1 else f"Ranks {ranks} of {world_size} have"
    return (
        f"{who} not called {call} within {timeout:.0f} s. Start all workers with the same init_method and "
        f"world_size; {more_time} waits longer."
    )


def _await(ready: Callable[[], bool], deadline: float) -> bool:
    """Poll, so that Ctrl-C works and nothing is printed by the store when time is up."""
    pause = _FIRST_PAUSE
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True
