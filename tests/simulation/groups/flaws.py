"""The machine with one thing wrong in it, to see that the checks notice."""

from __future__ import annotations

from typing import Any

from farprop.errors import CollectiveError, CollectiveMismatchError
from farprop.protocol.agreement import Agreement
from tests.simulation.planting import flaw

_HEALTHY: dict[str, Any] = {name: value for name, value in vars(Agreement).items() if callable(value)}


def _group_flaw(method: str) -> Any:
    return flaw(Agreement, method, kind="groups")


@_group_flaw("hear")
def early_statements_forgotten(self: Agreement, rank: int, number: int, statement: str) -> None:
    if number == self.number and self._own[number] != statement:
        self._fail(CollectiveMismatchError(f"Rank {self.rank} called {self._own[number]}, rank {rank} {statement}"))


@_group_flaw("hear")
def past_statements_forgotten(self: Agreement, rank: int, number: int, statement: str) -> None:
    if number >= self.number:
        _HEALTHY["hear"](self, rank, number, statement)


@_group_flaw("hear")
def wrong_rank_blamed(self: Agreement, rank: int, number: int, statement: str) -> None:
    _HEALTHY["hear"](self, self.rank if number == self.number else rank, number, statement)


@_group_flaw("die")
def deaths_taken_for_leaving(self: Agreement, rank: int, why: str) -> None:
    self.leave(rank)


@_group_flaw("die")
def deaths_not_told(self: Agreement, rank: int, why: str) -> None:
    """As if everybody would see for itself."""
    was_broken = self.failure is not None
    _HEALTHY["die"](self, rank, why)
    self.is_announced = self.is_announced or (self.failure is not None and not was_broken)


@_group_flaw("leave")
def leaving_taken_for_death(self: Agreement, rank: int) -> None:
    self.die(rank, "it said goodbye")


@_group_flaw("_fail")
def failures_not_told(self: Agreement, error: CollectiveError) -> None:
    _HEALTHY["_fail"](self, error)
    self.is_announced = True


@_group_flaw("be_told")
def words_not_believed(self: Agreement, rank: int, kind: str, text: str) -> None:
    pass


@_group_flaw("be_told")
def losses_told_as_something_else(self: Agreement, rank: int, kind: str, text: str) -> None:
    _HEALTHY["be_told"](self, rank, kind.replace("RankLost", "Collective"), text)
