"""What one worker knows of references, and what it wants done about them."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from farprop.ids import GlobalId
from farprop.protocol.references.states import (
    User,
    UserEvent,
    Value,
    ValueEvent,
    next_user_state,
    next_value_state,
)


class UserReference:
    """A reference to a value of another worker."""

    __slots__ = ("cell", "children", "early", "exists", "fork", "orphans", "owner", "parent", "rref", "state")

    def __init__(self, owner: int, rref: GlobalId, fork: GlobalId, parent: int, state: User, exists: bool) -> None:
        self.owner = owner
        self.rref = rref
        self.fork = fork
        self.parent = parent
        self.state = state
        self.exists = exists
        self.children: set[GlobalId] = set()  # forks that were passed on and are not known to be counted
        self.early = False  # it was passed on when the owner may not have had a record of the value
        self.orphans = False  # somebody whom it was passed to so early may have passed it on, and does not hold it
        self.cell: Any = None  # the runtime's

    def move(self, event: UserEvent) -> None:
        self.state = next_user_state(self.state, event)

    @property
    def made_here(self) -> bool:
        """It comes from a ``remote()`` of this worker, and not in a message."""
        return self.parent < 0


class OwnedValue:
    """A value of this worker that others refer to, or may refer to."""

    __slots__ = ("accepts", "cell", "forks", "rref", "state")

    def __init__(self, rref: GlobalId, state: Value) -> None:
        self.rref = rref
        self.state = state
        self.forks: dict[GlobalId, int] = {}  # the forks that count, and who has them
        self.accepts: dict[GlobalId, int] = {}  # forks that came here before the value, and whom to tell when it comes
        self.cell: Any = None  # the runtime's

    def move(self, event: ValueEvent) -> None:
        self.state = next_value_state(self.state, event)


class Passed(NamedTuple):
    """A fork that this worker has sent and that is not known to be safe."""

    to: int
    source: UserReference | OwnedValue
    route: object
    """The connection that it was sent on."""


class Happening(enum.Enum):
    """What the runtime has to hear of."""

    CONFIRMED = "the owner counts this reference"
    VOID = "this reference is of no use any more"
    SETTLED = "the owner counts this reference, which has arrived, or never will"
    FREED = "nobody elsewhere refers to this value"
    BROKEN = "this value will never be made"
    SEND = "there is something to send to this worker now"
    SEND_LATER = "there is something to send to this worker, and no hurry"


class Effect(NamedTuple):
    happening: Happening
    subject: Any
    """A ``UserReference``, an ``OwnedValue``, or a worker's rank."""
