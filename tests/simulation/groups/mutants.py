"""Mutants of the consistency check of collectives, to see that the simulation kills them."""

from __future__ import annotations

from typing import Any

from farprop.errors import CollectiveError, CollectiveMismatchError
from farprop.protocol.collective_consistency import CollectiveConsistency
from tests.simulation.harness import mutant

_HEALTHY: dict[str, Any] = {name: value for name, value in vars(CollectiveConsistency).items() if callable(value)}


def _group_mutant(method: str) -> Any:
    return mutant(CollectiveConsistency, method, kind="groups")


@_group_mutant("on_fingerprint")
def early_fingerprints_forgotten(self: CollectiveConsistency, rank: int, number: int, fingerprint: str) -> None:
    if number == self.number and self._own[number] != fingerprint:
        self._fail(CollectiveMismatchError(f"Rank {self.rank} called {self._own[number]}, rank {rank} {fingerprint}"))


@_group_mutant("on_fingerprint")
def past_fingerprints_forgotten(self: CollectiveConsistency, rank: int, number: int, fingerprint: str) -> None:
    if number >= self.number:
        _HEALTHY["on_fingerprint"](self, rank, number, fingerprint)


@_group_mutant("on_fingerprint")
def wrong_rank_blamed(self: CollectiveConsistency, rank: int, number: int, fingerprint: str) -> None:
    _HEALTHY["on_fingerprint"](self, self.rank if number == self.number else rank, number, fingerprint)


@_group_mutant("on_peer_lost")
def deaths_taken_for_leaving(self: CollectiveConsistency, rank: int, why: str) -> None:
    self.on_peer_left(rank, "", "")


@_group_mutant("on_peer_lost")
def deaths_not_reported(self: CollectiveConsistency, rank: int, why: str) -> None:
    """As if every rank noticed the death itself."""
    was_broken = self.failure is not None
    _HEALTHY["on_peer_lost"](self, rank, why)
    self.is_announced = self.is_announced or (self.failure is not None and not was_broken)


@_group_mutant("on_peer_left")
def leaving_taken_for_death(self: CollectiveConsistency, rank: int, kind: str, text: str) -> None:
    self.on_peer_lost(rank, "it said goodbye")


@_group_mutant("on_peer_left")
def reasons_of_leavers_ignored(self: CollectiveConsistency, rank: int, kind: str, text: str) -> None:
    _HEALTHY["on_peer_left"](self, rank, "", "")


@_group_mutant("_fail")
def failures_not_reported(self: CollectiveConsistency, error: CollectiveError) -> None:
    _HEALTHY["_fail"](self, error)
    self.is_announced = True


@_group_mutant("on_peer_failure")
def peer_failures_ignored(self: CollectiveConsistency, rank: int, kind: str, text: str) -> None:
    pass


@_group_mutant("on_peer_failure")
def losses_reported_as_other_failures(self: CollectiveConsistency, rank: int, kind: str, text: str) -> None:
    _HEALTHY["on_peer_failure"](self, rank, kind.replace("RankLost", "Collective"), text)
