"""What travels: forks inside calls and answers, and batches of operations between two workers."""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import NamedTuple

from farprop.errors import ProtocolError
from farprop.ids import GlobalId

_FORK = struct.Struct("<HHQHQB")
_COUNT = struct.Struct("<I")
_SITE_LENGTH = 2
_ONE = _COUNT.size + _FORK.size
_OPERATION = struct.Struct("<BHQHQB")


class Fork(NamedTuple):
    """A reference on its way in a message. The sender made the fork's id, so it is the parent."""

    owner: int
    rref: GlobalId
    fork: GlobalId
    exists: bool
    """The sender knows that the owner has a record of the value."""


class Kind(enum.IntEnum):
    """What one worker asks another one to do with a reference."""

    REGISTER = 1  # to the owner: count this fork, which has come to me
    ACCEPT = 2  # to the parent: the fork is counted, you need not hold yours for it
    DELETE = 3  # to the owner: this fork, which you count, is gone
    FORGO = 4  # to the owner: the fork of a call that I got no answer to is gone, now or when the call comes
    REVOKE = 5  # to the receiver of a message that may be lost: if this fork has not come, don't take it
    RECALL = 6  # to the owner: the call that makes this value may be lost; if it has not come, don't run it
    CLEANUP = 7  # to one who has it: this autograd context, which stands in the place of a value, has ended


class Operation(NamedTuple):
    kind: Kind
    rref: GlobalId
    fork: GlobalId
    flag: bool = False
    """Of REGISTER: ``Fork.exists``. Of ACCEPT, DELETE and FORGO: there may be orphans, which are forks that were passed
    on before the value was made and that nobody holds any more, because of a death."""


class Batch(NamedTuple):
    """Operations for one worker, in order. A batch keeps its number when it is sent again."""

    number: int
    operations: tuple[Operation, ...]


class Reply(NamedTuple):
    """What became of a batch: a byte for each operation, 1 if it was done and 0 if there was nothing to do it on."""

    number: int
    results: bytes


def pack_forks(forks: Sequence[Fork]) -> bytes:
    rows = [_FORK.pack(f.owner, *f.rref, *f.fork, f.exists) for f in forks]
    return _COUNT.pack(len(rows)) + b"".join(rows)


def unpack_forks(data: bytes | bytearray | memoryview) -> tuple[list[Fork], int]:
    """The forks in front of a message's pickle, and where the pickle starts."""
    if len(data) < _COUNT.size:
        raise ProtocolError("a message with references is too short")
    (count,) = _COUNT.unpack_from(data)
    if count == 1 and len(data) >= _ONE:
        owner, rref_on, rref, fork_on, fork, exists = _FORK.unpack_from(data, _COUNT.size)
        return [Fork(owner, GlobalId(rref_on, rref), GlobalId(fork_on, fork), bool(exists))], _ONE
    end = _COUNT.size + count * _FORK.size
    if len(data) < end:
        raise ProtocolError(f"a message says that it has {count} references, and is too short for them")
    forks = []
    for owner, rref_on, rref, fork_on, fork, exists in _FORK.iter_unpack(data[_COUNT.size : end]):
        forks.append(Fork(owner, GlobalId(rref_on, rref), GlobalId(fork_on, fork), bool(exists)))
    return forks, end


def unpack_site(data: bytes | memoryview, at: int) -> tuple[bytes, int]:
    """The place in the program that stands behind the forks of a call that makes a value, and where it ends."""
    start = at + _SITE_LENGTH
    end = start + int.from_bytes(data[at:start], "little")
    if end > len(data):
        raise ProtocolError("a call that makes a value is too short")
    return bytes(data[start:end]), end


def pack_operations(operations: Sequence[Operation]) -> bytes:
    return b"".join([_OPERATION.pack(kind, *rref, *fork, flag) for kind, rref, fork, flag in operations])


def unpack_operations(data: bytes) -> tuple[Operation, ...]:
    try:
        return tuple(
            Operation(Kind(kind), GlobalId(rref_on, rref), GlobalId(fork_on, fork), bool(flag))
            for kind, rref_on, rref, fork_on, fork, flag in _OPERATION.iter_unpack(data)
        )
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"a batch of operations on references makes no sense: {error}") from error
