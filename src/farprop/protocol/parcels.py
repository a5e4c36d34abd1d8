"""Parcels: bytes that calls to several workers have in common, on their way there. No sockets, no memory.

The calls themselves go from the caller to each worker, as all calls do, and name the parcel that has their large
arguments. So a function runs because of its call, never because of a parcel: to deliver a parcel twice does no harm.

``Spread`` is the caller's side: which worker of each other host gets the bytes, and what follows if it fails. ``Relay``
is what such a worker owes to the others. ``ChunkWindow`` says which chunks may be sent next, and ``Chunks`` which have
come. ``Arrivals`` is what every worker knows of the parcels that it gets, and which calls wait for them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

_REMEMBERED = 10_000
_Request = TypeVar("_Request")


class ParcelId(NamedTuple):
    """A parcel: who sends it, and its number there."""

    caller: int
    number: int


class Stop(NamedTuple):
    """A worker that gets a parcel, and how many calls there need it."""

    rank: int
    uses: int


Host = tuple[Stop, ...]
Route = tuple[Host, ...]
"""The way of a parcel from host to host. The first worker of each host is its relay: it gets the chunks, shares the
parcel with the others of its host, and sends it on to the next host."""


class Send(NamedTuple):
    """Send the parcel to the first worker of this route."""

    route: Route

    @property
    def relay(self) -> int:
        return self.route[0][0].rank


class GiveUp(NamedTuple):
    """Nobody is left who could bring the parcel to this worker: fail the calls to it that are still open."""

    rank: int


class Spread:
    """The way of a parcel to the workers of other hosts, as its caller knows it.

    First it goes along a chain of all hosts. Each worker that fails as a relay is tried once; those who waited for it
    get the parcel from another one of their own host, which gets it from the caller.
    """

    def __init__(self, hosts: Route) -> None:
        self._hosts = hosts
        self._tried: set[int] = set()
        self._under_way: dict[int, frozenset[int]] = {}  # by relay: who waits for it
        self._waiting = {
            stop.rank for host in hosts for stop in host
        }  # who may not have it, as far as the caller knows

    @property
    def relays(self) -> list[int]:
        """Who is to report."""
        return list(self._under_way)

    @property
    def is_over(self) -> bool:
        return not self._under_way

    def start(self) -> list[Send | GiveUp]:
        return [self._send(self._hosts)] if self._hosts else []

    def on_done(self, relay: int, missing: Iterable[int]) -> list[Send | GiveUp]:
        """A relay says that all who waited for it have the parcel, except for these."""
        expected = self._under_way.pop(relay, frozenset())
        lacking = expected & set(missing)
        self._waiting -= expected - lacking
        return self._again(lacking)

    def on_lost(self, relay: int) -> list[Send | GiveUp]:
        """A relay is gone, or could not do it."""
        return self._again(self._under_way.pop(relay, frozenset()))

    def on_stalled(self, relay: int) -> list[Send | GiveUp]:
        """A relay does nothing: others must not wait for it. It may go on later, and gets the rest of its bytes."""
        expected = self._under_way.get(relay)
        if expected is None or expected == {relay}:
            return []
        self._under_way[relay] = expected & {relay}
        return self._again(expected - {relay})

    def on_ended(self, rank: int) -> None:
        """The calls to a worker have ended: it needs nothing any more."""
        self._waiting.discard(rank)

    def _again(self, ranks: Iterable[int]) -> list[Send | GiveUp]:
        actions: list[Send | GiveUp] = []
        wanted = set(ranks) & self._waiting
        for host in self._hosts:
            lacking = [stop for stop in host if stop.rank in wanted]
            untried = [stop for stop in lacking if stop.rank not in self._tried]
            if untried:
                others = [stop for stop in lacking if stop is not untried[0]]
                actions.append(self._send(((untried[0], *others),)))
            else:
                self._waiting -= {stop.rank for stop in lacking}
                actions += [GiveUp(stop.rank) for stop in lacking]
        return actions

    def _send(self, route: Route) -> Send:
        send = Send(route)
        self._tried.add(send.relay)
        self._under_way[send.relay] = frozenset(stop.rank for host in route for stop in host)
        return send

    def validate(self) -> None:
        expected = [rank for ranks in self._under_way.values() for rank in ranks]
        assert len(expected) == len(set(expected)), "two relays are to bring it to one worker"
        assert set(self._under_way) <= self._tried
        assert set(self._waiting) <= set(expected), "nobody brings it to one who waits"


class Relay:
    """What one worker owes to those behind it on a route: those of its host, and the next hosts."""

    def __init__(self, route: Route) -> None:
        self.near = route[0][1:]
        self.behind = route[1:]
        self.all_ranks = [stop.rank for host in route for stop in host]
        self._missing: set[int] = set()
        self._unconfirmed = {stop.rank for stop in self.near}
        self._is_complete = False
        self._is_behind_done = not self.behind

    def on_complete(self) -> None:
        """The parcel is complete here, and its own requests have it."""
        self._is_complete = True

    def on_shared(self, rank: int) -> None:
        """A worker of this host says that it has the parcel."""
        self._unconfirmed.discard(rank)

    def on_share_failed(self, rank: int) -> None:
        """It can't be reached, or is gone."""
        if rank in self._unconfirmed:
            self._unconfirmed.discard(rank)
            self._missing.add(rank)

    def on_shares_overdue(self) -> None:
        """Those who have said nothing have stopped. They find the parcel when they go on: this host's kernel has it."""
        self._unconfirmed.clear()

    def on_behind_done(self, missing: Iterable[int]) -> None:
        """The next relay has reported."""
        if not self._is_behind_done:
            self._is_behind_done = True
            self._missing |= set(missing)

    def on_behind_lost(self) -> None:
        """The next relay is gone, or does nothing: the caller sees to all who wait for it."""
        self.on_behind_done(stop.rank for host in self.behind for stop in host)

    @property
    def report(self) -> list[int] | None:
        """Who does not have the parcel because of this worker; None as long as that is not known."""
        is_done = self._is_complete and not self._unconfirmed and self._is_behind_done
        return sorted(self._missing) if is_done else None


class ChunkWindow:
    """Which chunks of a parcel may be sent next: those that are there, as long as not too many are unconfirmed."""

    def __init__(self, count: int, most: int) -> None:
        self._left = count  # that are not confirmed
        self._most = most
        self._ready: deque[int] = deque()
        self._unconfirmed = 0

    def offer(self, indices: Iterable[int]) -> None:
        """These chunks are there."""
        self._ready.extend(indices)

    def take(self) -> int | None:
        """The next chunk to send; None if there is none that may be sent now."""
        if not self._ready or self._unconfirmed >= self._most:
            return None
        self._unconfirmed += 1
        return self._ready.popleft()

    def on_confirmed(self) -> None:
        self._unconfirmed -= 1
        self._left -= 1

    @property
    def is_over(self) -> bool:
        """Whether all chunks are confirmed."""
        return not self._left

    @property
    def awaits_answer(self) -> bool:
        return self._unconfirmed > 0


class Chunks:
    """Which chunks of a parcel one sender has brought. Each is stored once."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._claimed: set[int] = set()
        self._stored = 0

    def claim(self, index: int) -> bool:
        """Whether to store this chunk: not if it makes no sense, or has come before."""
        if index in self._claimed or not 0 <= index < self._count:
            return False
        self._claimed.add(index)
        return True

    def on_stored(self) -> bool:
        """A chunk is stored: whether the parcel is complete now."""
        self._stored += 1
        return self._stored == self._count


class Arrivals(Generic[_Request]):
    """The parcels of one worker, and the requests that wait for them.

    A parcel is unknown, *here* (requests that need it are still to come), or *over*: all requests have got it, or it
    was dropped. Of those that are over the last ones are remembered, so that one that comes again is not kept.
    """

    def __init__(self) -> None:
        self._here: dict[ParcelId, int] = {}  # how many requests will still need it
        self._held: dict[ParcelId, list[_Request]] = {}
        self._withdrawn: OrderedDict[ParcelId, int] = OrderedDict()  # how many requests did not wait for it
        self._over: OrderedDict[ParcelId, None] = OrderedDict()

    def arrived(self, parcel: ParcelId, uses: int) -> list[_Request] | None:
        """A parcel is complete, for so many requests.

        Returns:
            The requests that waited for it, to run now; None if the parcel has come before.
        """
        if parcel in self._here or parcel in self._over:
            return None
        held = self._held.pop(parcel, [])
        self._note(parcel, uses - len(held) - self._withdrawn.pop(parcel, 0))
        return held

    def request(self, parcel: ParcelId, request: _Request) -> bool | None:
        """A request that needs a parcel has come.

        Returns:
            Whether to run it now. False if it is held until the parcel comes, None if the parcel is over.
        """
        if parcel in self._over:
            return None
        left = self._here.get(parcel)
        if left is None:
            self._held.setdefault(parcel, []).append(request)
            return False
        self._note(parcel, left - 1)
        return True

    def withdraw(self, parcel: ParcelId, request: _Request) -> bool:
        """A request does not wait any longer: True for the one call that takes it out."""
        held = self._held.get(parcel, [])
        if request not in held:
            return False
        held.remove(request)
        if not held:
            del self._held[parcel]
        # It is one of the uses that the parcel comes with: nobody else will take it.
        self._withdrawn[parcel] = self._withdrawn.pop(parcel, 0) + 1
        if len(self._withdrawn) > _REMEMBERED:
            self._withdrawn.popitem(last=False)
        return True

    def drop(self, parcel: ParcelId) -> list[_Request]:
        """Forget a parcel; returns the requests that waited for it, which will never run."""
        self._note(parcel, 0)
        self._withdrawn.pop(parcel, None)
        return self._held.pop(parcel, [])

    def of_caller(self, caller: int) -> list[ParcelId]:
        """The parcels of a worker that are not over."""
        return [parcel for parcel in {*self._here, *self._held} if parcel.caller == caller]

    def is_here(self, parcel: ParcelId) -> bool:
        return parcel in self._here

    @property
    def holds(self) -> bool:
        """Whether requests wait."""
        return bool(self._held)

    def held(self) -> list[_Request]:
        """All requests that wait."""
        return [request for requests in list(self._held.values()) for request in requests]

    def _note(self, parcel: ParcelId, left: int) -> None:
        if left > 0:
            self._here[parcel] = left
            return
        self._here.pop(parcel, None)
        self._over[parcel] = None
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    @property
    def is_empty(self) -> bool:
        return not (self._here or self._held)

    def validate(self) -> None:
        assert not self._here.keys() & self._held.keys(), "a request waits for a parcel that is here"
        assert not self._over.keys() & (self._here.keys() | self._held.keys())


def hosts_of(stops: Sequence[tuple[str, Stop]]) -> Route:
    """Group workers by the host that each is on, in the order in which the hosts first occur."""
    hosts: dict[str, list[Stop]] = {}
    for host, stop in stops:
        hosts.setdefault(host, []).append(stop)
    return tuple(tuple(found) for found in hosts.values())
