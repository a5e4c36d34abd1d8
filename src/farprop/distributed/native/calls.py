"""What a collective is while it runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

_LONGEST = 1000


@dataclass
class Call:
    """Its number in the group, what this rank stated, and when it has to be over."""

    number: int
    statement: str
    seconds: float
    deadline: float

    @cached_property
    def encoded(self) -> bytes:
        """The statement as bytes that are equal if, and only if, all of it is."""
        return f"{self.number} {self.statement}".encode() + b"\0"


def shortened(statement: str) -> str:
    """A statement that fits everywhere. The digest of what it does not show makes different ones differ."""
    if len(statement) <= _LONGEST - 100:
        return statement
    digest = hashlib.sha256(statement.encode()).hexdigest()[:16]
    return f"{statement[: _LONGEST - 200]}... (digest {digest})"
