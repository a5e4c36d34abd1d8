"""Rendezvous: workers find each other through a c10d store. They sign their values, and ignore unsigned ones.

A static group (its world size is known) meets once: each worker publishes an entry, and rank 0 publishes its decision.
Workers may join and leave a dynamic group at any time: the store holds a list of entries, which a worker reads again
when it looks for a member.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from farprop.errors import RendezvousError
from farprop.protocol.roster import Entry, check_roster, decision_from_json, decision_to_json, different_secrets
from farprop.protocol.signing import Keys, Unsigned, unsigned_text
from farprop.runtime.liveness import Verdict
from farprop.runtime.rate_limited_log import RateLimitedLog
from farprop.runtime.store_file import StoreFile

_log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_GONE, _DEAD = b"gone", b"dead"  # what a place holds after its worker
_MAX_GAP = 4096  # empty places in a row; with more, the counter was not set by the workers of the job
_JOB = re.compile("[0-9a-f]{32}")
_ATTEMPT = re.compile("[0-9a-f]{16}")
_WHO = "Who else uses the store?"
_MISSING = "missing"
LookFor = Callable[[Entry, float], Verdict]
"""``look_for(worker, deadline)`` finds out whether a worker is alive."""
MIXED = "RPC group mixes statically and dynamically initialized members which is not supported."


class CheckedStore:
    """A store whose errors name the key. No method waits for a key."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._file = StoreFile.of(store)

    def set(self, key: str, value: str) -> None:
        with self._using(key, to_write=True):
            self._store.set(key, value)

    def set_first(self, key: str, value: str) -> bytes:
        """Set a key unless it is set, and return its value. A key that holds nothing is not set."""
        return self.replace(key, "", value)

    def replace(self, key: str, old: str, new: str) -> bytes:
        """Set a key if it holds the old value, and return its value."""
        with self._using(key, to_write=old != new):
            found: Any = self._store.compare_set(key, old, new)
        return found if isinstance(found, bytes) else str(found).encode()

    def get(self, key: str) -> bytes:
        """The value of a key that was set a moment ago. The store's own ``get`` waits for minutes if it is gone."""
        value = self.replace(key, _MISSING, _MISSING)
        if value == _MISSING.encode():
            raise RendezvousError(f"{key!r} was removed from the store. Who else can write to it?")
        return value

    def has(self, keys: list[str]) -> bool:
        with self._using(keys[0] if keys else "", to_write=False):
            return bool(self._store.check(keys))

    def count(self, key: str, step: int = 0) -> int:
        with self._using(key, to_write=True):
            return int(self._store.add(key, step))

    @contextmanager
    def _using(self, key: str, to_write: bool) -> Iterator[None]:
        if self._file is not None:
            self._file.prepare(to_write)
        try:
            yield
        except RuntimeError as error:
            raise RendezvousError(
                f"The store failed at {key!r}. It has ended, can't be reached, or somebody else has written to it. "
                f"It says: {error}"
            ) from error


def job_of(store: dist.Store) -> str:
    """A random name for the job. All workers that share this store get the same one."""
    job = agree(store, "job", secrets.token_hex(16))
    if not _JOB.fullmatch(job):
        raise RendezvousError(f"'job' in the store says {job[:64]!r}, which no worker writes. {_WHO}")
    return job


def agree(store: dist.Store, name: str, value: str) -> str:
    """The value that the first worker proposed under this name. It is not signed."""
    return CheckedStore(store).set_first(name, value).decode(errors="replace")


_INIT_RPC = "init_rpc"
_MORE_TIME = "a larger rpc_timeout in the options"


def attempt_of(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout: float,
    call: str = _INIT_RPC,
    more_time: str = _MORE_TIME,
) -> str:
    """The name of this start of the job, to put before all keys, where a launcher's store outlives the workers.

    Torch's elastic agent starts all workers again if one fails, with the same store, and what the workers of the last
    attempt have written is still there. So rank 0 names each attempt, and the others say in it that they are there;
    it is the current one if rank 0 has seen them. A worker that finds an old attempt waits for the next one. The agent
    starts no worker before those of the last attempt have ended.

    Args:
        store: the launcher's store, or a part of it.
        rank: the rank of this worker.
        world_size: the number of workers.
        timeout: seconds to wait for the other workers.
        call: as for :func:`meet`.
        more_time: as for :func:`meet`.

    Raises:
        RendezvousError: not all workers came in time.
    """
    found = CheckedStore(store)
    own = secrets.token_hex(8)
    deadline = time.monotonic() + timeout
    attempt = ""
    if rank == 0:
        attempt = own
        found.set("attempt", attempt)
        others = {other: f"{attempt}/{other}" for other in range(1, world_size)}
        if not wait_until(lambda: found.has(list(others.values())), deadline):
            raise RendezvousError(_missing(found, others, world_size, timeout, call, more_time))
        found.set(f"{attempt}/all", " ".join(found.get(name).decode(errors="replace") for name in others.values()))
        return attempt

    def is_current() -> bool:
        nonlocal attempt
        named = found.get("attempt").decode(errors="replace") if found.has(["attempt"]) else ""
        if named and named != attempt:
            if not _ATTEMPT.fullmatch(named):
                raise RendezvousError(f"'attempt' in the store says {named[:64]!r}, which no worker writes. {_WHO}")
            attempt = named
            found.set(f"{attempt}/{rank}", own)
        seen = f"{attempt}/all"
        return bool(attempt) and found.has([seen]) and own in found.get(seen).decode(errors="replace").split()

    if not wait_until(is_current, deadline + 1.0):  # rank 0 raises first
        places = {other: f"{attempt}/{other}" for other in range(1, world_size)} if attempt else {0: "attempt"}
        raise RendezvousError(_missing(found, places, world_size, timeout, call, more_time))
    return attempt


def is_launchers(store: Any) -> bool:
    """Whether a store is that of torch's elastic agent, which the workers of all attempts use."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (
        isinstance(store, dist.TCPStore) and is_agents_port(store.port) and "TORCHELASTIC_RESTART_COUNT" in os.environ
    )


def is_agents_port(port: int) -> bool:
    """Whether torch's elastic agent has a store at this port. A program may have chosen another one."""
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return is_agents and str(port) == os.environ.get("MASTER_PORT")


def host_of(store: Any) -> str | None:
    """The host that runs a store's server, as this process knows it; None for stores without one, such as files."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, dist.TCPStore) else None


def meet(
    given: dist.Store,
    keys: Keys,
    own: Entry,
    timeout: float,
    call: str = _INIT_RPC,
    more_time: str = _MORE_TIME,
) -> list[Entry]:
    """Join a static group.

    Args:
        given: the job's store.
        keys: sign and verify values.
        own: the entry of this worker.
        timeout: seconds to wait for the other workers.
        call: the function that every worker calls to get here, for the error text.
        more_time: what a user passes to wait longer, for the error text.

    Returns:
        The entries of all workers, by rank.

    Raises:
        RendezvousError: the group can't be formed. Every worker raises the same error.
    """
    store = CheckedStore(given)
    if store.set_first("kind", "static") != b"static":
        raise RendezvousError(f"{MIXED} Pass world_size on all workers or on none.")
    _claim(store, keys, f"claim/{own.rank}", own, f"Rank {own.rank} is taken already")
    deadline = time.monotonic() + timeout
    places = {rank: f"worker/{rank}" for rank in range(own.world_size)}
    store.set(places[own.rank], keys.sign(places[own.rank], own.to_json()))
    if own.rank == 0:
        entries = [own]
        names = list(places.values())[1:]
        if wait_until(lambda: store.has(names), deadline):
            try:
                entries += [_read_entry(store, keys, own, name) for name in names]
                problem = _misplaced(entries) or check_roster(entries)
            except RendezvousError as error:
                problem = str(error)
        else:
            problem = _missing(store, places, own.world_size, timeout, call, more_time)
        store.set("decision", keys.sign("decision", decision_to_json(entries, problem)))
    elif not wait_until(lambda: store.has(["decision"]), deadline + 1.0):
        raise RendezvousError(_missing(store, places, own.world_size, timeout, call, more_time))
    try:
        return _read_decision(store, keys, own)
    finally:
        with suppress(RendezvousError):
            store.count("seen", 1)
            if own.rank == 0:
                # Rank 0 often runs the store's server: it must not leave before all have read the decision.
                wait_until(lambda: store.count("seen") >= own.world_size, min(deadline, time.monotonic() + 10.0) + 1.0)


def _read_entry(store: CheckedStore, keys: Keys, own: Entry, name: str) -> Entry:
    value = store.get(name)
    try:
        return Entry.from_json(keys.read(name, value))
    except Unsigned as error:
        raise RendezvousError(different_secrets(own, unsigned_text(value), name)) from error


def _misplaced(entries: list[Entry]) -> str | None:
    wrong = [place for place, entry in enumerate(entries) if entry.rank != place]
    return f"'worker/{wrong[0]}' in the store is the entry of rank {entries[wrong[0]].rank}." if wrong else None


def _read_decision(store: CheckedStore, keys: Keys, own: Entry) -> list[Entry]:
    try:
        entries = decision_from_json(keys.read("decision", store.get("decision")))
    except Unsigned as error:
        if own.rank != 0 and store.has(["worker/0"]):
            _read_entry(store, keys, own, "worker/0")  # raises a better error if rank 0 has another secret
        raise RendezvousError(str(error)) from error
    if len(entries) != own.world_size or _misplaced(entries) or entries[own.rank] != own:
        raise RendezvousError(
            "'decision' in the store is from another start of the job, and lists other workers: somebody put it back."
        )
    return entries


class Places:
    """The list of a dynamic group's workers. A place whose worker has left is never used again.

    ``predecessors`` are the dead workers whose name or rank this one has taken.
    """

    def __init__(self, store: dist.Store, keys: Keys, own: Entry) -> None:
        self._store = CheckedStore(store)
        self._doubts = RateLimitedLog(_log)
        self._keys = keys
        self._own = own
        self._known: dict[int, Entry] = {}
        self._gone: set[int] = set()
        self._ended: dict[str, bytes] = {}  # by instance, what its place holds after it
        self._count = 0  # how many places there were when they were last read
        self._is_complete = True  # all of them were set
        self._place = 0
        self._claims: dict[str, str] = {}  # the name and the rank: what this worker has written there, or has tried to
        self.predecessors: list[Entry] = []

    def enter(self, look_for: LookFor, seconds: float) -> None:
        """Join the group.

        Args:
            look_for: finds out whether a worker that has the name or the rank of this one is alive.
            seconds: how long that may take.
        """
        deadline = time.monotonic() + seconds
        store, own = self._store, self._own
        if store.set_first("kind", "dynamic") != b"dynamic":
            raise RendezvousError(f"{MIXED} This group was started with a world_size; pass the same here.")
        try:
            name_taken = f"Worker name {own.name!r} is not unique: it is taken"
            self._claim(f"name/{own.name}", name_taken, look_for, deadline)
            self._claim(f"id/{own.rank}", f"Rank {own.rank} is taken already", look_for, deadline)
            self.members(strict=True)
            dead = self._places_of_dead(look_for, deadline)
            problem = check_roster([own, *(entry for place, entry in self._known.items() if place not in dead)])
            if problem is not None:
                raise RendezvousError(problem)
            self._place = store.count("places", 1)
            self._publish(self._place, own.to_json())
            # In this order: somebody with the name is listed at any time, and the later place counts.
            for place in dead:
                self._publish(place, _DEAD.decode())
        except BaseException:
            # Others need the name and the rank, and have to go on without this worker.
            with suppress(RendezvousError):
                self.leave()
            raise

    def _claim(self, key: str, taken: str, look_for: LookFor, deadline: float) -> None:
        """Take a name or a rank that is free, or whose worker is dead; raises ``RendezvousError`` if it lives."""
        own = self._claims[key] = self._keys.sign(key, self._own.to_json())
        value = self._store.set_first(key, own)
        while value != own.encode():
            try:
                holder = Entry.from_json(self._keys.read(key, value))
            except Unsigned as error:
                raise RendezvousError(different_secrets(self._own, unsigned_text(value), key)) from error
            self._require_dead(holder, taken, look_for, deadline)
            _log.info("%s takes the place of %s: it is dead", self._own.name, holder.name)
            value = self._store.replace(key, value.decode(), own)  # another joiner may be faster
            if value == own.encode():
                self.predecessors.append(holder)

    def _require_dead(self, holder: Entry, taken: str, look_for: LookFor, deadline: float) -> None:
        verdict = look_for(holder, deadline)
        if verdict is Verdict.ALIVE:
            raise RendezvousError(f"{taken} {_whose(holder)}. Give each worker its own name and rank.")
        if verdict is Verdict.UNKNOWN:
            raise RendezvousError(
                f"{taken} {_whose(holder)}, which does not answer, but may be alive. Give each worker its own name "
                "and rank. If it is to be replaced, end it first; a larger rpc_timeout in the options waits longer."
            )

    def _places_of_dead(self, look_for: LookFor, deadline: float) -> list[int]:
        """The places of dead workers that had the name or the rank of this one; raises if one of them lives."""
        own, found = self._own, list[int]()
        known_dead = {entry.instance for entry in self.predecessors}
        for place, entry in self._known.items():
            if entry.name == own.name or entry.rank == own.rank:
                if entry.instance not in known_dead:
                    # Its claim is gone: somebody removed it, or a worker that shared only its name or rank left.
                    taken = f"Worker name {entry.name!r} or rank {entry.rank} is not unique: it is taken"
                    self._require_dead(entry, taken, look_for, deadline)
                found.append(place)
        return found

    def members(self, strict: bool = False) -> dict[str, Entry]:
        """The current members by name. Unsigned values are skipped with a warning; with ``strict`` they raise."""
        with self._believing_nothing(strict):
            place = gap = 0
            is_complete, count = True, self._store.count("places")
            ended = len(self._gone)
            while place < count:
                place += 1
                if place not in self._gone:
                    gap += 1
                    with self._believing_nothing(strict):
                        if not self._store.has([f"place/{place}"]):
                            is_complete = False
                        elif self._read(place, f"place/{place}"):
                            gap = 0
                    if gap > _MAX_GAP:
                        raise RendezvousError("'places' in the store counts more workers than joined: somebody set it.")
                if place == count and len(self._gone) > ended:
                    # Whoever has taken the place of one that has ended may have come after the places were counted.
                    ended, count = len(self._gone), self._store.count("places")
            self._count, self._is_complete = count, is_complete
        return self.listed()

    def listed(self) -> dict[str, Entry]:
        """The members by name, as they were last read; of two places with one name the later one counts."""
        known = self._known.copy()  # other threads may read the store, too
        return {known[place].name: known[place] for place in sorted(known)}

    def may_have_grown(self) -> bool:
        """Whether a worker may have joined since the members were last read. One request, which writes nothing."""
        return not self._is_complete or self._store.get("places") != str(self._count).encode()

    def has_left(self, instance: str) -> bool:
        """Whether a worker is known to have left the group itself."""
        return self._ended.get(instance) == _GONE

    def was_replaced(self, instance: str) -> bool:
        """Whether another worker has found out that this one is dead, and has its place."""
        return self._ended.get(instance) == _DEAD

    @contextmanager
    def _believing_nothing(self, strict: bool) -> Iterator[None]:
        try:
            yield
        except RendezvousError as error:
            if strict:
                raise
            self._doubts.warning("%s ignores a value in the store: %s", self._own.name, error)

    def _read(self, place: int, name: str) -> bool:
        """Whether a worker of this job wrote it."""
        value = self._store.get(name)
        try:
            text = self._keys.read(name, value)
        except Unsigned as error:
            text = unsigned_text(value)
            if text not in (_GONE, _DEAD) or place in self._known:
                raise RendezvousError(different_secrets(self._own, text, name)) from error
            # Most likely its worker left before the current members found their secret.
            _log.info("%s: %r is left from a worker that is gone, and signed with another secret", self._own.name, name)
            return False
        if text in (_GONE, _DEAD):
            entry = self._known.get(place)
            if entry is not None:
                self._ended[entry.instance] = text
            self._gone.add(place)
            self._known.pop(place, None)
        else:
            entry = Entry.from_json(text)
            # Another thread may have read the place later than this one, and noted it earlier.
            if place not in self._gone:
                self._known[place] = entry
        return True

    def leave(self) -> None:
        """Leave the group, or take back what was written before joining it failed."""
        if self._place:
            self._publish(self._place, _GONE.decode())
        for key, claim in self._claims.items():
            self._store.replace(key, claim, "")

    def _publish(self, place: int, text: str) -> None:
        name = f"place/{place}"
        self._store.set(name, self._keys.sign(name, text))


def _claim(store: CheckedStore, keys: Keys, key: str, own: Entry, taken: str) -> None:
    value = store.set_first(key, keys.sign(key, own.to_json()))
    try:
        holder = Entry.from_json(unsigned_text(value))  # not trusted: it only helps to explain
    except RendezvousError:
        raise RendezvousError(f"{taken}. Give each worker its own name and rank.") from None
    if holder.instance != own.instance:
        raise RendezvousError(f"{taken} {_whose(holder)}. Give each worker its own name and rank.")


def _whose(holder: Entry) -> str:
    host = "".join(character for character in holder.host[:200] if character.isprintable())
    return f"by a process on {host} (pid {holder.pid})"


def _missing(
    store: CheckedStore, places: dict[int, str], world_size: int, timeout: float, call: str, more_time: str
) -> str:
    """Who has not come: whose key is not set."""
    absent = [rank for rank, place in places.items() if not store.has([place])]
    if not absent:
        return f"All {world_size} workers came, but rank 0 did not answer within {timeout:.0f} s."
    ranks = ", ".join(map(str, absent))
    who = f"Rank {ranks} of {world_size} has" if len(absent) == 1 else f"Ranks {ranks} of {world_size} have"
    return (
        f"{who} not called {call} within {timeout:.0f} s. Start all workers with the same init_method and "
        f"world_size; {more_time} waits longer."
    )


def wait_until(ready: Callable[[], bool], deadline: float) -> bool:
    """Poll until ``ready``; False at the deadline. The store's own wait ignores Ctrl-C, and prints at a timeout."""
    pause = _FIRST_PAUSE
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True
