"""Messages written by hand: any header, any body."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from farprop.protocol.references.records import Fork
from farprop.wire.message import BUFFER, HEADER, Message


def pack(
    kind: int,
    flags: int,
    call_id: int,
    seconds: float,
    name: bytes,
    body: bytes,
    table: Sequence[tuple[int, int]] = (),
    returned: Sequence[int] = (),
) -> bytes:
    """A message without its inline buffers. ``body`` follows the table: heads and payload, or garbage."""
    header = HEADER.pack(kind, flags, len(table), len(name), len(returned), call_id, seconds, len(body))
    rows = [BUFFER.pack(*row) for row in table]
    return b"".join((header, name, struct.pack(f"<{len(returned)}I", *returned), *rows, body))


def pack_fork(fork: Fork) -> bytes:
    return struct.pack("<HHQHQB", fork.owner, *fork.rref, *fork.fork, fork.exists)


def pack_forks(forks: Sequence[Fork]) -> bytes:
    """The head of a message with references."""
    return struct.pack("<I", len(forks)) + b"".join(map(pack_fork, forks))


class RawMessage(Message):
    """A message whose payload has the heads in it already, right or wrong."""

    __slots__ = ()

    def _pack_heads(self) -> bytes:
        return b""
