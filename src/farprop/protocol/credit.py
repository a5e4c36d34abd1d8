"""Credit: how the origin of something that spreads over many workers learns that it has come to rest everywhere.

The origin starts with all of it, each message takes a share along, and whoever has nothing left to do gives its share
back. When all of it is back, nothing is under way. Shares are exact: a number of parts, each 2 to the minus ``level``.
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
        """As many shares, none of them empty."""
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
