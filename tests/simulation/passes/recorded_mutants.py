"""Mutants of recorded passes, and of passes to some inputs: of the state machine, and of the simulated runtime."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from farprop.protocol.backward import ROOTS, Run, Target
from farprop.protocol.needed_sends import Needed, NeededSends, Reached
from tests.simulation.harness import mutant
from tests.simulation.passes.local_pass import LocalPass

_HEALTHY: dict[str, Any] = {**vars(LocalPass), **vars(NeededSends)}


def recorded_mutant(method: str, owner: Any = LocalPass) -> Any:
    return mutant(owner, method, kind="passes")


# Recorded passes


@recorded_mutant("undo")
def messages_of_failed_pass_stay(self: LocalPass) -> None:
    """A failed pass is undone, and later passes wait for gradients of its messages."""
    self.fail()
    self.undone = True


@recorded_mutant("record_arrival")
def answers_not_recorded(self: LocalPass, sources: Iterable[int], sender: int, message_id: int) -> None:
    """Gradients that arrive at the origin are not recorded: a later pass ends there."""
    if self.rank != self.id.origin:
        _HEALTHY["record_arrival"](self, sources, sender, message_id)


@recorded_mutant("record_arrival")
def first_of_bundle_recorded(self: LocalPass, sources: Iterable[int], sender: int, message_id: int) -> None:
    """Of the gradients of a bundle, the first are recorded."""
    _HEALTHY["record_arrival"](self, list(sources)[:1], sender, message_id)


@recorded_mutant("record_send")
def arrives_before_it_is_recorded(self: LocalPass, targets: Any) -> int:
    """A message gets its number, and its send node is forgotten."""
    message_id: int = _HEALTHY["record_send"](self, targets)
    self.graph.forget((message_id,))
    return message_id


@recorded_mutant("_record")
def gradients_seen_early(self: LocalPass, run: Run) -> None:
    """Programs use gradients of a pass that runs, and may fail."""
    _HEALTHY["_record"](self, run)
    self.show()


# Passes to some inputs


@recorded_mutant("_leading", NeededSends)
def everything_is_needed(self: NeededSends) -> set[Target]:
    """Gradients go to workers that lead to no input."""
    return set(self._reached)


@recorded_mutant("_leading", NeededSends)
def inputs_behind_another_worker_missed(self: NeededSends) -> set[Target]:
    """A send that leads to an input through another worker is not needed."""
    found = {source for source, reached in self._reached.items() if reached.has_input}
    return found | {source for source in self._reached if source.message_id == ROOTS and found}


@recorded_mutant("questions", NeededSends)
def asked_once(self: NeededSends) -> dict[int, list[int]]:
    """Only the workers that the roots reach are asked."""
    return {} if self._asked else _HEALTHY["questions"](self)  # type: ignore[no-any-return]


@recorded_mutant("needed", NeededSends)
def all_targets_needed(self: NeededSends) -> dict[int, Needed]:
    """A needed source sends gradients to all that it reaches."""
    found: dict[int, Needed] = _HEALTHY["needed"](self)
    reached = {target for some in self._reached.values() for target in some.targets}
    return {worker: Needed(sources, frozenset(reached)) for worker, (sources, _) in found.items()}


@recorded_mutant("reached_by")
def inputs_here_not_seen(self: LocalPass, sources: Iterable[int]) -> list[Reached]:
    """Workers other than the origin don't say that they have inputs."""
    answers: list[Reached] = _HEALTHY["reached_by"](self, sources)
    return answers if self.rank == self.id.origin else [Reached(targets, False) for targets, _ in answers]


@recorded_mutant("prepare")
def pass_not_pruned(self: LocalPass, needed: Needed) -> None:
    """Sources that are not needed count: units wait for them."""
    every = frozenset(self.graph.reaches(self._roots))
    _HEALTHY["prepare"](self, Needed(every, needed.targets))
