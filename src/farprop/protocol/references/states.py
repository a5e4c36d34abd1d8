"""The states of a reference at a user, and of a value at its owner: two tables, from which the diagrams are drawn.

A pair of state and event that is not in a table can't happen; ``next_state`` raises ``AssertionError`` for it.
"""

from __future__ import annotations

import enum


class _Named(enum.Enum):
    """Hashed by identity: the hash of Python's own enums is a function in Python, and these are keys of tables."""

    __hash__ = object.__hash__


class User(_Named):
    """What a user's reference is. Those that end in ``_DROPPED`` can't be reached by the program any more."""

    CREATING = "remote() has asked the owner to make the value; no answer yet"
    ARRIVED = "came in a message from another user; the owner does not count it yet"
    CONFIRMED = "the owner counts it"
    DOUBTFUL = "remote() got no answer: the owner may count it or not"
    VOID = "of no use: its value was never made or is lost, or the message that brought it was given up"
    CREATING_DROPPED = "dropped before the owner answered remote()"
    ARRIVED_DROPPED = "dropped before the owner counted it"
    DROPPED = "dropped; kept for those it was passed to until they are counted"
    ENDED = "forgotten here, and the owner is told if it may count it"


class UserEvent(_Named):
    MADE = "the owner answered"
    UNANSWERED = "the call failed, and may have arrived"
    UNSENT = "the call was never sent"
    REGISTERED = "the owner counts it now"
    REFUSED = "the owner does not have the value"
    NEVER_CAME = "the owner says that the call never came"
    OWNER_DIED = "the owner died"
    DROP = "the program dropped it"
    CHILDREN_SAFE = "everyone it was passed to is counted"


class Value(_Named):
    """What an owner has."""

    AWAITED = "somebody refers to it; the call that makes it has not come yet"
    MADE = "the call has come: its function runs or has run"
    BROKEN = "it will never be made; kept to say so to those who refer to it"
    FREED = "nobody elsewhere refers to it"


class ValueEvent(_Named):
    CALL_CAME = "the call that makes it came"
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

# States in which an answer of the owner will say whether it counts the reference.
UNCONFIRMED = frozenset({User.CREATING, User.ARRIVED, User.CREATING_DROPPED, User.ARRIVED_DROPPED})
USABLE = frozenset({User.CREATING, User.ARRIVED, User.CONFIRMED})


def next_user_state(state: User, event: UserEvent) -> User:
    following = USER_TABLE.get((state, event))
    assert following is not None, f"a reference in state {state.name} can't have the event {event.name}"
    return following


def next_value_state(state: Value, event: ValueEvent) -> Value:
    following = VALUE_TABLE.get((state, event))
    assert following is not None, f"a value in state {state.name} can't have the event {event.name}"
    return following
