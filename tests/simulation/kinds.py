"""The kinds of simulated jobs, and what a report says of each. Importing this registers the flaws of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.simulation import flaws, world
from tests.simulation.groups import flaws as group_flaws
from tests.simulation.groups import world as group_world
from tests.simulation.outcome import Outcome
from tests.simulation.passes import flaws as pass_flaws
from tests.simulation.passes import runtime_flaws
from tests.simulation.passes import world as pass_world
from tests.simulation.planting import FLAWS, Flaw

__all__ = ["FLAW_FILES", "KINDS", "Kind", "flaws_of"]

FLAW_FILES = (flaws, pass_flaws, runtime_flaws, group_flaws)


class Kind(NamedTuple):
    title: str
    run: Callable[..., Outcome]
    lists: dict[str, tuple[str, ...]]  # counts that are listed on a line each
    faults: tuple[str, ...]
    kept: str = ""  # the text for the count "kept ids"


KINDS = {
    "references": Kind(
        "Remote references",
        world.run,
        {
            "messages": ("calls", "answers", "forks", "batches", "replies"),
            "operations": ("REGISTER", "ACCEPT", "DELETE", "FORGO", "REVOKE", "RECALL"),
        },
        (
            "lost messages",
            "doubled messages",
            "timeouts",
            "unsent messages",
            "interrupted sends",
            "broken connections",
            "partitions",
            "divorces",
            "crashes",
        ),
        "ids that the workers keep until somebody dies",
    ),
    "passes": Kind(
        "Backward passes",
        pass_world.run,
        {
            "passes": ("SMART", "FAST", "complete", "compared with the other mode"),
            "outcomes": ("ended", "failed", "stuck", "cut short"),
            "messages": ("gradients", "give-backs", "surveys", "releases", "answers"),
            "failure": ("failures", "aborts"),
            "clean-up": ("clean-ups", "questions"),
        },
        ("timeouts", "failing units", "broken connections", "crashes"),
    ),
    "groups": Kind(
        "Process groups",
        group_world.run,
        {"words": ("part words", "closed words", "goodbye words", "broken words")},
        ("mismatches", "deaths", "partings"),
    ),
}


def flaws_of(kind: str) -> dict[str, Flaw]:
    return {name: flaw for name, flaw in FLAWS.items() if flaw.kind == kind}
