"""Mutants of the protocol of parcels, to see that the simulation kills them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from farprop.protocol.parcels import Arrivals, Chunks, ChunkWindow, GiveUp, ParcelId, Relay, Route, Send, Spread
from tests.simulation.harness import mutant

_SPREAD: dict[str, Any] = dict(vars(Spread))
_RELAY: dict[str, Any] = dict(vars(Relay))
_ARRIVALS: dict[str, Any] = dict(vars(Arrivals))
Actions = list[Send | GiveUp]


def _parcel_mutant(owner: type, method: str) -> Any:
    return mutant(owner, method, kind="parcels")


@_parcel_mutant(Spread, "start")
def stars_instead_of_a_chain(self: Spread) -> Actions:
    """Each worker gets the bytes from the caller."""
    return [self._send(((stop,),)) for host in self._hosts for stop in host]


@_parcel_mutant(Spread, "on_done")
def missing_workers_forgotten(self: Spread, relay: int, missing: Iterable[int]) -> Actions:
    result: Actions = _SPREAD["on_done"](self, relay, ())
    return result


@_parcel_mutant(Spread, "on_lost")
def those_behind_the_dead_forgotten(self: Spread, relay: int) -> Actions:
    self._waiting -= self._under_way.pop(relay, frozenset())
    return []


@_parcel_mutant(Spread, "on_stalled")
def those_behind_the_stopped_wait(self: Spread, relay: int) -> Actions:
    return []


@_parcel_mutant(Spread, "on_stalled")
def stopped_relays_taken_for_dead(self: Spread, relay: int) -> Actions:
    """One that goes on later is not expected any more."""
    return self.on_lost(relay)


@_parcel_mutant(Spread, "_send")
def relays_tried_for_ever(self: Spread, route: Route) -> Send:
    send: Send = _SPREAD["_send"](self, route)
    self._tried.discard(send.relay)
    return send


@_parcel_mutant(Relay, "on_behind_lost")
def lost_relays_not_reported(self: Relay) -> None:
    self.on_behind_done(())


@_parcel_mutant(Relay, "on_share_failed")
def failed_shares_not_reported(self: Relay, rank: int) -> None:
    self.on_shared(rank)


@_parcel_mutant(Relay, "on_complete")
def reports_before_shares_are_confirmed(self: Relay) -> None:
    _RELAY["on_complete"](self)
    self.on_shares_overdue()


@_parcel_mutant(Relay, "on_shares_overdue")
def stopped_neighbours_waited_for(self: Relay) -> None:
    pass


@_parcel_mutant(Relay, "report")
@property
def reports_before_the_next_host(self: Relay) -> list[int] | None:
    return sorted(self._missing) if self._is_complete and not self._unconfirmed else None


@_parcel_mutant(Chunks, "on_stored")
def complete_too_early(self: Chunks) -> bool:
    self._stored += 1
    return self._stored >= self._count - 1


@_parcel_mutant(ChunkWindow, "on_confirmed")
def window_never_opens(self: ChunkWindow) -> None:
    self._left -= 1


@_parcel_mutant(Arrivals, "request")
def requests_not_held(self: Arrivals[Any], parcel: ParcelId, request: Any) -> bool | None:
    return True


@_parcel_mutant(Arrivals, "arrived")
def parcels_that_come_again_kept(self: Arrivals[Any], parcel: ParcelId, uses: int) -> list[Any] | None:
    held = self._held.pop(parcel, [])
    self._over.pop(parcel, None)
    self._note(parcel, uses - len(held))
    return held


@_parcel_mutant(Arrivals, "arrived")
def held_requests_run_again(self: Arrivals[Any], parcel: ParcelId, uses: int) -> list[Any] | None:
    """They stay in the table, and run when the parcel comes a second time."""
    held = list(self._held.get(parcel, []))
    self._note(parcel, uses - len(held))
    return held


@_parcel_mutant(Arrivals, "drop")
def requests_of_the_dead_kept(self: Arrivals[Any], parcel: ParcelId) -> list[Any]:
    self._note(parcel, 0)
    return []
