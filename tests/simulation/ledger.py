"""What really happened, seen from above: who passed what to whom, which calls came, who crashed."""

from __future__ import annotations

from collections.abc import Iterator

from farprop.ids import GlobalId


class Violation(Exception):
    """The protocol broke a promise."""


class ValueStory:
    """A value, from its creation on."""

    __slots__ = ("came", "creator", "never_came", "owner", "recalled", "refused", "rref", "runs")

    def __init__(self, rref: GlobalId, owner: int, creator: int, came: bool) -> None:
        self.rref = rref
        self.owner = owner
        self.creator = creator
        self.came = came  # the call that makes it
        self.refused = False  # the owner did not run the call when it came
        self.recalled = False  # the creator was told that the call may be lost, or was never sent
        self.never_came = False  # the owner said so to the creator
        self.runs = 0


class ForkStory:
    """A fork: who has it or will have it, and which other fork it was made from. The owner's own have no parent."""

    __slots__ = ("holder", "parent", "revoked", "sender", "value")

    def __init__(self, value: ValueStory, sender: int, holder: int, parent: ForkStory | None) -> None:
        self.value = value
        self.sender = sender
        self.holder = holder
        self.parent = parent
        self.revoked = False  # the sender was told that the message may be lost, or was never sent

    def lineage(self) -> Iterator[int]:
        """Everyone on whom it depends that the value is still there when the fork is counted."""
        story: ForkStory | None = self
        while story is not None:
            yield story.holder
            yield story.sender
            story = story.parent


class Ledger:
    def __init__(self) -> None:
        self.values: dict[GlobalId, ValueStory] = {}
        self.forks: dict[GlobalId, ForkStory] = {}
        self.crashed: set[int] = set()
        self.divorced: set[tuple[int, int]] = set()  # both ways round
        self.unlucky: set[int] = set()  # crashed or divorced from anybody

    def crash(self, rank: int) -> None:
        self.crashed.add(rank)
        self.unlucky.add(rank)

    def divorce(self, one: int, other: int) -> None:
        self.divorced.update(((one, other), (other, one)))
        self.unlucky.update((one, other))

    def parted(self, one: int, other: int) -> bool:
        """Whether one of them has reason to take the other for dead."""
        return one in self.crashed or other in self.crashed or (one, other) in self.divorced

    def excused(self, story: ForkStory) -> bool:
        """Whether a death can have cost the fork its value."""
        return any(rank in self.unlucky for rank in story.lineage())
