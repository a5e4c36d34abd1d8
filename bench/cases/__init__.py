"""The cases, one file per subject. A file registers its cases with `@case` and is imported at the end.

The function of a case gets the side's `Api` and the name of the other worker, if there is one. It checks one result, so
that a wrong answer is never timed, and returns a function that takes one sample.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.channel import Sample
from bench.side import Api as Api


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    label: str
    goal: float
    """torch's time over ours that we want to reach."""
    prepare: Callable[[Api, str], Sample]
    samples: int
    """Samples in each round, unless its time is over before."""
    warmup: int
    """Samples before each round that don't count."""
    calls: int
    """Calls in one sample; times are reported per call."""
    env: Mapping[str, str] = field(default_factory=dict)
    """For farprop's processes; cases with another environment run in other processes."""
    floor: str = ""
    """The bare ping-pong to compare with, if any; for ``alone`` and ``round_trips``, the kind of a round trip."""
    ranks: int = 0
    """The size of the process group that runs it; 0 for two RPC workers."""
    against: Mapping[str, str] | None = None
    """Compare with farprop itself, in this environment, and not with torch."""
    workers: int = 2
    """How many RPC workers run it."""
    alone: Callable[[], Sample] | None = None
    """Makes a sample of the same work in one process: with ``round_trips``, the floor."""
    round_trips: int = 1
    """How many round trips one call of a sample takes at least, one after the other."""


CASES: dict[str, Case] = {}


def add_case(added: Case) -> None:
    if added.name in CASES:
        raise ValueError(f"two cases are named {added.name!r}")
    CASES[added.name] = added


def case(
    name: str,
    label: str,
    *,
    goal: float,
    samples: int,
    warmup: int,
    calls: int = 1,
    env: Mapping[str, str] | None = None,
    floor: str = "",
    ranks: int = 0,
    against: Mapping[str, str] | None = None,
    alone: Callable[[], Sample] | None = None,
    round_trips: int = 1,
) -> Callable[[Callable[[Api, str], Sample]], Callable[[Api, str], Sample]]:
    """Register the decorated function as a case."""

    def register(prepare: Callable[[Api, str], Sample]) -> Callable[[Api, str], Sample]:
        add_case(
            Case(
                name,
                label,
                goal,
                prepare,
                samples,
                warmup,
                calls,
                env or {},
                floor,
                ranks,
                against,
                alone=alone,
                round_trips=round_trips,
            )
        )
        return prepare

    return register


# The order of these is the order of the table.
for _family in (
    "cases.calls",
    "cases.awaiting",
    "cases.streams",
    "cases.one_to_many",
    "cases.gaps",
    "cases.security",
    "cases.observing",
    "cases.autograd",
    "cases.optim",
    "cases.script",
    "programs",
    "cases.groups",
):
    importlib.import_module(f"bench.{_family}")
