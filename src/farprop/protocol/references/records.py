"""What one worker knows about references: states, the records that carry them, and instructions to the runtime.

Two tables define the states: one for a reference at its user, one for a value at its owner. Diagrams of both are in
``docs/references.md``; ``python -m tests.diagram`` draws them. A pair of state and event that is not in its table
raises ``InvalidTransition``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from farprop.errors import ProtocolError
from farprop.ids import GlobalId


class _FastHash(enum.Enum):
    """Hashes members by identity: they are keys of tables, and ``Enum.__hash__`` is a Python function."""

    __hash__ = object.__hash__


class User(_FastHash):
    """The state of a reference at its user. In the ``_DROPPED`` states the program can't reach it any more."""

    CREATING = "remote() has asked the owner to make the value; no answer yet"
    BORROWED = "came in a request; its sender keeps its own reference for it until the call has ended"
    ARRIVED = "came in a message from another user; the owner does not list it yet"
    CONFIRMED = "the owner lists it"
    DOUBTFUL = "remote() got no answer: the owner may list it or not"
    VOID = "unusable: its value was never made or is lost, or the message that carried it was given up"
    CREATING_DROPPED = "dropped before the owner answered remote()"
    ARRIVED_DROPPED = "dropped before the owner listed it"
    DROPPED = "dropped; kept until the owner lists every fork made from it"
    ENDED = "forgotten here; the owner is told if it may list it"


class UserEvent(_FastHash):
    """What can happen to a reference at its user."""

    MADE = "the owner answered"
    UNANSWERED = "the call failed, and may have arrived"
    UNSENT = "the call was never sent"
    KEPT = "it outlives its call, or its sender may not keep its own any more"
    REGISTERED = "the owner lists it now"
    REFUSED = "the owner does not have the value"
    NEVER_CAME = "the owner says that the call never arrived"
    OWNER_DIED = "the owner died"
    DROP = "the program dropped it"
    CHILDREN_SAFE = "the owner lists every fork made from it"


class Value(_FastHash):
    """The state of a value at its owner."""

    AWAITED = "somebody refers to it; the call that makes it has not arrived yet"
    MADE = "the call has arrived: its function runs or has run"
    BROKEN = "it will never be made; kept to tell those who refer to it"
    FREED = "no other worker refers to it"


class ValueEvent(_FastHash):
    """What can happen to a value at its owner."""

    CALL_CAME = "the call that makes it arrived"
    CALL_LOST = "its creator says that the call is lost, or died"
    LAST_GONE = "the last reference is gone"
    SHARED = "a local reference is passed to another worker"


USER_TABLE: dict[tuple[User, UserEvent], User] = {
    (User.CREATING, UserEvent.MADE): User.CONFIRMED,
    (User.CREATING, UserEvent.UNANSWERED): User.DOUBTFUL,
    (User.CREATING, UserEvent.UNSENT): User.VOID,
    (User.CREATING, UserEvent.OWNER_DIED): User.VOID,
    (User.CREATING, UserEvent.DROP): User.CREATING_DROPPED,
    (User.CREATING_DROPPED, UserEvent.MADE): User.DROPPED,
    (User.CREATING_DROPPED, UserEvent.UNANSWERED): User.DROPPED,
    (User.CREATING_DROPPED, UserEvent.UNSENT): User.ENDED,
    (User.CREATING_DROPPED, UserEvent.OWNER_DIED): User.ENDED,
    (User.BORROWED, UserEvent.KEPT): User.ARRIVED,
    (User.BORROWED, UserEvent.DROP): User.ENDED,
    (User.BORROWED, UserEvent.OWNER_DIED): User.VOID,
    (User.ARRIVED, UserEvent.REGISTERED): User.CONFIRMED,
    (User.ARRIVED, UserEvent.REFUSED): User.VOID,
    (User.ARRIVED, UserEvent.OWNER_DIED): User.VOID,
    (User.ARRIVED, UserEvent.DROP): User.ARRIVED_DROPPED,
    (User.ARRIVED_DROPPED, UserEvent.REGISTERED): User.DROPPED,
    (User.ARRIVED_DROPPED, UserEvent.REFUSED): User.ENDED,
    (User.ARRIVED_DROPPED, UserEvent.OWNER_DIED): User.ENDED,
    (User.CONFIRMED, UserEvent.DROP): User.DROPPED,
    (User.CONFIRMED, UserEvent.OWNER_DIED): User.VOID,
    (User.DOUBTFUL, UserEvent.DROP): User.DROPPED,
    (User.DOUBTFUL, UserEvent.NEVER_CAME): User.VOID,
    (User.DOUBTFUL, UserEvent.OWNER_DIED): User.VOID,
    (User.VOID, UserEvent.DROP): User.ENDED,
    (User.DROPPED, UserEvent.CHILDREN_SAFE): User.ENDED,
    (User.DROPPED, UserEvent.NEVER_CAME): User.ENDED,
    (User.DROPPED, UserEvent.OWNER_DIED): User.ENDED,
}

VALUE_TABLE: dict[tuple[Value, ValueEvent], Value] = {
    (Value.AWAITED, ValueEvent.CALL_CAME): Value.MADE,
    (Value.AWAITED, ValueEvent.CALL_LOST): Value.BROKEN,
    (Value.AWAITED, ValueEvent.LAST_GONE): Value.FREED,
    (Value.MADE, ValueEvent.LAST_GONE): Value.FREED,
    (Value.BROKEN, ValueEvent.LAST_GONE): Value.FREED,
    (Value.FREED, ValueEvent.SHARED): Value.MADE,
    (Value.FREED, ValueEvent.CALL_CAME): Value.MADE,
}

# Something is still to come: the owner's answer, which says whether it lists the reference, or the end of the call.
UNCONFIRMED = frozenset({User.CREATING, User.BORROWED, User.ARRIVED, User.CREATING_DROPPED, User.ARRIVED_DROPPED})
# The reference came from another user, and the owner has not said yet whether it lists it.
UNREGISTERED = frozenset({User.ARRIVED, User.ARRIVED_DROPPED})
USABLE = frozenset({User.CREATING, User.BORROWED, User.ARRIVED, User.CONFIRMED})
# The program can still reach the reference, so it can drop it.
DROPPABLE = frozenset({User.CREATING, User.BORROWED, User.ARRIVED, User.CONFIRMED, User.DOUBTFUL, User.VOID})


class InvalidTransition(ProtocolError):
    """An event that can't happen in this state: a peer broke the protocol, or the state machine has a bug.

    Attributes:
        record: The reference or value that the event happened to.
        state: The state it was in, and still is.
        event: The event that has no entry in the table for this state.
    """

    def __init__(self, record: UserReference | OwnedValue, state: User | Value, event: UserEvent | ValueEvent) -> None:
        super().__init__(f"{record} is in state {state.name}, which can't have the event {event.name}")
        self.record = record
        self.state = state
        self.event = event


class ReferenceData(Protocol):
    """What the runtime keeps with a reference of a user. The protocol never looks at it."""

    site: str
    error: Exception | None
    callbacks: list[Callable[[], None]] | None
    watch: Any
    collected: bool
    was_borrowed: bool


class ValueData(Protocol):
    """What the runtime keeps with a value: the value itself, or why there is none. The protocol never looks at it."""

    value: Any
    error: BaseException | None
    done: bool
    broken_off: bool
    maker: bytes
    site: bytes
    created: float

    def fill(self, value: Any) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def break_off(self, error: BaseException) -> None: ...

    def replace(self, old: Any, new: Any) -> None: ...

    def when_done(self, callback: Callable[[], None]) -> None: ...

    def wait(self, timeout: float | None) -> bool: ...

    def get(self) -> Any: ...


_S = TypeVar("_S", User, Value)
_E = TypeVar("_E", UserEvent, ValueEvent)


def _next_state(table: Mapping[tuple[_S, _E], _S], record: UserReference | OwnedValue, state: _S, event: _E) -> _S:
    following = table.get((state, event))
    if following is None:
        raise InvalidTransition(record, state, event)
    return following


class UserReference:
    """A reference of this worker to a value of another worker: one fork. ``info`` is the runtime's,
    which sets it before anybody else sees the record."""

    __slots__ = ("children", "early", "exists", "fork", "info", "orphans", "owner", "parent", "rref", "state")

    info: ReferenceData

    def __init__(
        self, owner: int, rref: GlobalId, fork: GlobalId, parent: int | None, state: User, exists: bool
    ) -> None:
        self.owner = owner
        self.rref = rref
        self.fork = fork
        self.parent = parent  # who passed it to this worker; None if a remote() of this worker made it
        self.state = state
        self.exists = exists  # the owner is known to have a record of the value
        self.children: set[GlobalId] = set()  # forks made from it that the owner is not known to list
        self.early = False  # it was passed on when the owner may not have had a record of the value
        self.orphans = False  # a receiver of such an early fork is gone, and may have passed it on before

    def __str__(self) -> str:
        return f"the reference {self.fork} to the value {self.rref} of worker {self.owner}"

    def move(self, event: UserEvent) -> None:
        """Go to the next state.

        Raises:
            InvalidTransition: The event can't happen in this state.
        """
        self.state = _next_state(USER_TABLE, self, self.state, event)


class OwnedValue:
    """A value of this worker that other workers refer to, or may refer to. ``slot`` is the runtime's, which sets
    it when it is first needed."""

    __slots__ = ("accepts", "forks", "rref", "slot", "state")

    slot: ValueData

    def __init__(self, rref: GlobalId, state: Value) -> None:
        self.rref = rref
        self.state = state
        self.forks: dict[GlobalId, int] = {}  # the reference list: which forks exist, and which worker holds each
        self.accepts: dict[GlobalId, int] = {}  # forks that came back here before the value was made, and their parents

    def __str__(self) -> str:
        return f"the value {self.rref} of this worker"

    def move(self, event: ValueEvent) -> None:
        """Go to the next state.

        Raises:
            InvalidTransition: The event can't happen in this state.
        """
        self.state = _next_state(VALUE_TABLE, self, self.state, event)


class Fork(NamedTuple):
    """A reference on its way in a message. The sender made the fork's id, so it is the parent."""

    owner: int
    rref: GlobalId
    fork: GlobalId
    exists: bool
    """The sender knows that the owner has a record of the value."""
    lent: bool = False
    """The message goes to the owner, and this is the fork of the sender itself, which holds it until the call has
    ended. So there is nothing to list and nothing to accept."""


class ReturnedFork(NamedTuple):
    """A borrowed fork that its receiver gives back. An answer carries it to the sender."""

    fork: GlobalId
    orphans: bool
    """As ``Operation.flag`` of RETURN."""


class PassedFork(NamedTuple):
    """A fork that this worker has sent, and that the owner is not known to list yet."""

    to: int
    source: UserReference | OwnedValue
    route: object
    """The connection that it was sent on."""


class InstructionKind(_FastHash):
    """What the state machine asks the runtime to do, or tells it."""

    CONFIRMED = "the owner lists this reference"
    VOID = "this reference is unusable from now on"
    SETTLED = "this reference, which came in a message, is confirmed or void now"
    FREED = "no other worker refers to this value any more"
    BROKEN = "this value will never be made"
    SEND = "there is something to send to this worker now"
    SEND_LATER = "there is something to send to this worker; it is not urgent"


class Instruction(NamedTuple):
    """One instruction of the state machine to the runtime."""

    kind: InstructionKind
    subject: Any
    """A ``UserReference``, an ``OwnedValue``, or a worker's rank."""
