"""Calls, and the functions that they run."""

from __future__ import annotations

from farprop.protocol.references.records import OwnedValue, UserReference
from farprop.protocol.references.states import User
from tests.simulation.ledger import ValueStory
from tests.simulation.network import Connection


class Call:
    """A call. It may make a value, to which the caller has a reference from the start."""

    __slots__ = ("callee", "caller", "certain", "connection", "number", "open", "reference")

    def __init__(self, number: int, caller: int, callee: int, reference: UserReference | None) -> None:
        self.number = number
        self.caller = caller
        self.callee = callee
        self.reference = reference
        self.connection: Connection | None = None
        self.certain = False  # it comes even if the connection breaks
        self.open = True

    def __str__(self) -> str:
        return f"#{self.number}"


class Task:
    """A function that was called, and the references in its arguments."""

    __slots__ = ("arguments", "call", "story")

    def __init__(self, call: Call, arguments: list[UserReference | OwnedValue], story: ValueStory | None) -> None:
        self.call = call
        self.arguments = arguments
        self.story = story  # of the value that it makes

    def any_in(self, state: User) -> bool:
        return any(isinstance(a, UserReference) and a.state is state for a in self.arguments)
