"""What travels in front of the gradients of a pass."""

from __future__ import annotations

import struct
from typing import NamedTuple

from farprop.errors import ProtocolError
from farprop.protocol.credit import Credit
from farprop.protocol.passes import PassId, Share, Statuses

# context, pair, origin, number, oldest pass of the origin's that still runs, flags; level of the credit, length of its
# parts, number of statuses
_HEAD = struct.Struct("<QQHQQBIHH")
_STATUS = struct.Struct("<HIB")
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
    credit, statuses = head.share
    parts = credit.parts.to_bytes((credit.parts.bit_length() + 7) // 8, "little")
    flags = _FAST * head.fast | _KEEP_GRAPH * head.keep_graph | _ANOMALY * head.anomaly
    packed = _HEAD.pack(
        head.context_id, head.pair, *head.pass_id, head.oldest, flags, credit.level, len(parts), len(statuses)
    )
    if not statuses:
        return packed + parts
    rows = [_STATUS.pack(worker, number, blocked) for worker, (number, blocked) in statuses.items()]
    return b"".join((packed, parts, *rows))


def unpack_head(data: bytes) -> PassHead:
    try:
        context_id, pair, origin, number, oldest, flags, level, size, count = _HEAD.unpack_from(data)
        at = _HEAD.size + size
        credit = Credit(int.from_bytes(data[_HEAD.size : at], "little"), level)
        statuses: Statuses = {}
        for _ in range(count):
            worker, statement, blocked = _STATUS.unpack_from(data, at)
            statuses[worker] = statement, bool(blocked)
            at += _STATUS.size
        if at != len(data):
            raise struct.error(f"it should have {at} bytes, and has {len(data)}")
    except struct.error as error:
        raise ProtocolError(f"a message of a backward pass makes no sense: {error}") from error
    return PassHead(
        context_id,
        pair,
        PassId(origin, number),
        oldest,
        bool(flags & _FAST),
        bool(flags & _KEEP_GRAPH),
        bool(flags & _ANOMALY),
        Share(credit, statuses),
    )
