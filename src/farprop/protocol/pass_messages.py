"""What travels in front of the gradients of a pass."""

from __future__ import annotations

import struct
from typing import NamedTuple

from farprop.errors import ProtocolError
from farprop.protocol.credit import Credit
from farprop.protocol.passes import ALL, PassId, Share, Statuses

# context, pair, origin, number, oldest pass of the origin's that still runs, flags; a share follows
_HEAD = struct.Struct("<QQHQQB")
# level of the credit, length of its parts, number of statuses; nothing at all stands for all the credit
_SHARE = struct.Struct("<IHH")
_STATUS = struct.Struct("<HIB")
_DEEPEST = 1 << 18  # level of a credit that is taken: half of what can be said, so that it can still be split
_FAST, _KEEP_GRAPH, _ANOMALY = 1, 2, 4


class PassHead(NamedTuple):
    context_id: int
    pair: int
    pass_id: PassId
    oldest: int
    fast: bool
    keep_graph: bool
    anomaly: bool
    share: Share


def pack_head(head: PassHead) -> bytes:
    context_id, pair, (origin, number), oldest, fast, keep_graph, anomaly, share = head
    flags = _FAST * fast | _KEEP_GRAPH * keep_graph | _ANOMALY * anomaly
    return _HEAD.pack(context_id, pair, origin, number, oldest, flags) + pack_share(share)


def pack_share(share: Share) -> bytes:
    if share == ALL:
        return b""
    credit, statuses = share
    parts = credit.parts.to_bytes((credit.parts.bit_length() + 7) // 8, "little")
    rows = [_STATUS.pack(worker, number, blocked) for worker, (number, blocked) in statuses.items()]
    return b"".join((_SHARE.pack(credit.level, len(parts), len(statuses)), parts, *rows))


def unpack_head(data: bytes) -> PassHead:
    try:
        context_id, pair, origin, number, oldest, flags = _HEAD.unpack_from(data)
    except struct.error as error:
        raise _nonsense(error) from error
    return PassHead(
        context_id,
        pair,
        PassId(origin, number),
        oldest,
        bool(flags & _FAST),
        bool(flags & _KEEP_GRAPH),
        bool(flags & _ANOMALY),
        unpack_share(data[_HEAD.size :]),
    )


def unpack_share(data: bytes) -> Share:
    if not data:
        return ALL
    try:
        level, size, count = _SHARE.unpack_from(data)
        at = _SHARE.size + size
        parts = int.from_bytes(data[_SHARE.size : at], "little")
        # Numbers of so many bits are made of it.
        if level > _DEEPEST or parts.bit_length() > level + 1:
            raise struct.error(f"a share of {parts.bit_length()} bits at level {level}")
        credit = Credit(parts, level)
        statuses: Statuses = {}
        for _ in range(count):
            worker, statement, blocked = _STATUS.unpack_from(data, at)
            statuses[worker] = statement, bool(blocked)
            at += _STATUS.size
        if at != len(data):
            raise struct.error(f"it should have {at} bytes, and has {len(data)}")
    except struct.error as error:
        raise _nonsense(error) from error
    return Share(credit, statuses)


def _nonsense(error: Exception) -> ProtocolError:
    return ProtocolError(f"a message of a backward pass makes no sense: {error}")
