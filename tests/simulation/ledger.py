"""What really happened in a run: forks, calls that arrived, crashes. And texts for the trace."""

from __future__ import annotations

from collections.abc import Iterator

from farprop.ids import GlobalId
from farprop.protocol.references.control_plane import Batch, ControlReply, Operation
from farprop.protocol.references.records import Fork, OwnedValue, UserReference


class ValueHistory:
    """A value, from its creation on."""

    __slots__ = ("came", "creator", "never_came", "owner", "recalled", "refused", "rref", "runs")

    def __init__(self, rref: GlobalId, owner: int, creator: int, came: bool) -> None:
        self.rref = rref
        self.owner = owner
        self.creator = creator
        self.came = came  # the call that makes it has arrived
        self.refused = False  # the owner did not run the call when it arrived
        self.recalled = False  # the creator was told that the call may be lost, or was never sent
        self.never_came = False  # the owner told the creator that the call never arrived
        self.runs = 0


class ForkHistory:
    """A fork: its holder, and the fork that it was made from. Forks that the owner made have no parent."""

    __slots__ = ("holder", "parent", "revoked", "sender", "value")

    def __init__(self, value: ValueHistory, sender: int, holder: int, parent: ForkHistory | None) -> None:
        self.value = value
        self.sender = sender
        self.holder = holder
        self.parent = parent
        self.revoked = False  # the sender was told that the message may be lost, or was never sent

    def lineage(self) -> Iterator[int]:
        """Every worker that the value's survival depends on until the owner lists the fork."""
        history: ForkHistory | None = self
        while history is not None:
            yield history.holder
            yield history.sender
            history = history.parent


class Ledger:
    """The truth about a run, which no worker knows."""

    def __init__(self) -> None:
        self.values: dict[GlobalId, ValueHistory] = {}
        self.forks: dict[GlobalId, ForkHistory] = {}
        self.crashed: set[int] = set()
        self.dead_to_each_other: set[tuple[int, int]] = set()  # pairs, both ways round
        self.ever_dead: set[int] = set()  # crashed, or believed dead by another worker

    def crash(self, rank: int) -> None:
        self.crashed.add(rank)
        self.ever_dead.add(rank)

    def false_death(self, one: int, other: int) -> None:
        self.dead_to_each_other.update(((one, other), (other, one)))
        self.ever_dead.update((one, other))

    def is_dead_to(self, one: int, other: int) -> bool:
        """Whether one of them has reason to believe the other dead."""
        return one in self.crashed or other in self.crashed or (one, other) in self.dead_to_each_other

    def excused(self, history: ForkHistory) -> bool:
        """Whether a death can be the reason that the value of the fork is lost."""
        return any(rank in self.ever_dead for rank in history.lineage())


def show(thing: object) -> object:
    """The text of an object in the trace."""
    match thing:
        case GlobalId():
            return f"{thing.created_on}.{thing.local_id}"
        case ControlReply():
            return f"reply {thing.number} {list(thing.results)}"
        case Batch():
            return f"batch {thing.number} [{', '.join(str(show(operation)) for operation in thing.operations)}]"
        case Operation():
            return f"{thing.kind.name}{'*' if thing.flag else ''} value {show(thing.rref)} fork {show(thing.fork)}"
        case Fork():
            return f"fork {show(thing.fork)} of value {show(thing.rref)} at {thing.owner}{'' if thing.exists else '?'}"
        case UserReference():
            return f"reference {show(thing.fork)} to value {show(thing.rref)} at {thing.owner} ({thing.state.name})"
        case OwnedValue():
            return f"own value {show(thing.rref)} ({thing.state.name})"
        case list():
            return "[" + ", ".join(str(show(item)) for item in thing) + "]"
    return thing
