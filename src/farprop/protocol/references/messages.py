"""What travels: forks inside calls and answers, and batches of operations between two workers."""

from __future__ import annotations

import enum
from typing import NamedTuple

from farprop.ids import GlobalId


class Fork(NamedTuple):
    """A reference on its way in a message. The sender made the fork's id, so it is the parent."""

    owner: int
    rref: GlobalId
    fork: GlobalId
    exists: bool
    """The sender knows that the owner has a record of the value."""


class OperationKind(enum.IntEnum):
    """What one worker asks another one to do with a reference."""

    REGISTER = 1  # to the owner: count this fork, which has come to me
    ACCEPT = 2  # to the parent: the fork is counted, you need not hold yours for it
    DELETE = 3  # to the owner: this fork, which you count, is gone
    FORGO = 4  # to the owner: the fork of a call that I got no answer to is gone, now or when the call comes
    REVOKE = 5  # to the receiver of a message that may be lost: if this fork has not come, don't take it
    RECALL = 6  # to the owner: the call that makes this value may be lost; if it has not come, don't run it
    CLEANUP = 7  # to one who has it: this autograd context, which stands in the place of a value, has ended


class Operation(NamedTuple):
    kind: OperationKind
    rref: GlobalId
    fork: GlobalId
    flag: bool = False
    """Of REGISTER: ``Fork.exists``. Of ACCEPT, DELETE and FORGO: there may be orphans, which are forks that were passed
    on before the value was made and that nobody holds any more, because of a death."""


class Batch(NamedTuple):
    """Operations for one worker, in order. A batch keeps its number when it is sent again."""

    number: int
    operations: tuple[Operation, ...]


class ControlReply(NamedTuple):
    """What became of a batch: a byte for each operation, 1 if it was done and 0 if there was nothing to do it on."""

    number: int
    results: bytes
