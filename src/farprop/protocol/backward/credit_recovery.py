"""Mattern's credit recovery: how the origin of a computation on many workers detects that it has terminated.

The origin starts with all of the credit. Each message carries a share of it, and a worker that has nothing left to do
returns its share to the origin. When the origin has all of the credit again, no message is in flight and no worker is
active. Shares are exact: a number of parts, each of which is 2 to the power of minus ``level``.
"""

from __future__ import annotations

from typing import NamedTuple


class Credit(NamedTuple):
    parts: int
    level: int

    def plus(self, other: Credit) -> Credit:
        if self.level < other.level:
            return Credit((self.parts << (other.level - self.level)) + other.parts, other.level)
        return Credit(self.parts + (other.parts << (self.level - other.level)), self.level)

    def split(self, count: int) -> list[Credit]:
        """Split the credit into ``count`` shares, none of them empty."""
        if count == 1:
            return [self]
        bits = (count - 1).bit_length()
        level = self.level + bits
        rest = (self.parts << bits) - (count - 1) * self.parts
        return [*[Credit(self.parts, level)] * (count - 1), Credit(rest, level)]

    @property
    def is_whole(self) -> bool:
        return self.parts == 1 << self.level


NONE = Credit(0, 0)
WHOLE = Credit(1, 0)
