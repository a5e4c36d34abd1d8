"""What the browsers are told: the last state of the job, and what was added to its drawings of late.

There is one board for all browsers, and it is of a limited size. A browser that reads slowly misses nothing that is
still on the board, and gets the rest in one message: nothing waits for it. Used by the thread of the event loop alone.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass

import msgspec

from farprop.dashboard.picture import Part, State

_MOST_PARTS = 150
_MOST_BYTES = 4 << 20


@dataclass(frozen=True)
class _Entry:
    number: int
    encoded: bytes


class Board:
    """Methods are called in the event loop."""

    def __init__(self) -> None:
        self._run = secrets.token_hex(4)  # the numbers of another run of the page mean nothing here
        self._number = 0
        self._state = b"null"
        self._note = ""
        self._job = ""
        self._parts: deque[_Entry] = deque()
        self._nbytes = 0
        self._changed = asyncio.Event()
        self.closed = False

    def post(self, state: State | None, part: Part | None, note: str = "") -> None:
        """Something is new: a look at the job, or a note that there was none."""
        self._number += 1
        if state is not None:
            if state.id != self._job:  # another job: nothing of the old one belongs on its drawings
                self._job = state.id
                self._parts.clear()
                self._nbytes = 0
            self._state = msgspec.json.encode(state)
        self._note = note
        if part is not None:
            encoded = msgspec.json.encode(part)
            self._parts.append(_Entry(self._number, encoded))
            self._nbytes += len(encoded)
            while len(self._parts) > _MOST_PARTS or self._nbytes > _MOST_BYTES:
                self._nbytes -= len(self._parts.popleft().encoded)
        self._wake()

    def close(self) -> None:
        """Nothing will be new any more."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_newer(self, number: int) -> None:
        """Wait until there is something newer than the message of this number, or the board is closed."""
        while not self.closed and self._number <= number:
            await self._changed.wait()

    def message_since(self, number: int) -> tuple[int, bytes]:
        """What a browser does not have yet that had the message of this number, and the number of this message."""
        parts = b",".join(entry.encoded for entry in self._parts if entry.number > number)
        note = msgspec.json.encode(self._note)
        return self._number, b'{"state":%s,"note":%s,"parts":[%s]}' % (self._state, note, parts)

    def label(self, number: int) -> str:
        """The id of a message, which a browser that comes back brings along."""
        return f"{self._run}.{number}"

    def number_of(self, label: str) -> int:
        """The number of a message from its id; 0 if it is not of this board."""
        run, _, number = label.partition(".")
        if run == self._run and number.isascii() and number.isdigit() and len(number) < 16:
            return min(int(number), self._number)
        return 0
