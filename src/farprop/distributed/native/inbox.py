"""What has come and was not asked for yet, and what was asked for and has not come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from farprop.distributed.native.frames import Kind
from farprop.errors import CollectiveError
from farprop.wire.room import room_for


class Receipt:
    """Room for something that another rank sends. ``on_end`` is called once, with an error or None.

    Args:
        kind: of a message, or of a part of a collective.
        source: the rank that it comes from; None for any.
        key: the tag, or the number of the collective.
        text: of which dtype it has to be; None if it does not matter.
    """

    def __init__(
        self,
        kind: Kind,
        source: int | None,
        key: int,
        room: memoryview,
        text: str | None,
        on_end: Callable[[Receipt, Exception | None], None],
    ) -> None:
        self.kind, self.source, self.key = kind, source, key
        self.room = room
        self.text = text
        self._on_end = on_end
        self._is_over = False

    def fits(self, kind: Kind, source: int, key: int) -> bool:
        return (self.kind, self.key) == (kind, key) and self.source in (None, source)

    def problem(self, source: int, text: str, length: int) -> Exception | None:
        """Why what a rank sends can't go here."""
        if self.text is not None and text != self.text:
            return CollectiveError(f"Rank {source} sends a tensor of {text} where one of {self.text} is received.")
        if length != len(self.room):
            return CollectiveError(f"Rank {source} sends {length} bytes where {len(self.room)} are received.")
        return None

    def end(self, error: Exception | None) -> None:
        if not self._is_over:
            self._is_over = True
            self._on_end(self, error)


class Letter:
    """Something that comes: its bytes go to ``room``, which is the receipt's or, if nobody asked for it yet, new."""

    def __init__(self, kind: Kind, source: int, key: int, text: str, length: int) -> None:
        self.kind, self.source, self.key = kind, source, key
        self.text = text
        self.length = length
        self.room: memoryview | None = None
        self.receipt: Receipt | None = None
        self.is_here = False


class Inbox:
    """Brings letters and receipts together, in the order of each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._letters: deque[Letter] = deque()
        self._receipts: list[Receipt] = []

    def expect(self, receipt: Receipt) -> None:
        """Somebody wants this."""
        with self._lock:
            for letter in self._letters:
                if letter.receipt is None and receipt.fits(letter.kind, letter.source, letter.key):
                    self._letters.remove(letter)
                    letter.receipt = receipt
                    break
            else:
                self._receipts.append(receipt)
                return
            is_here = letter.is_here
        if is_here:
            self._hand_over(letter)

    def open(self, letter: Letter) -> None:
        """A letter begins to come: give it room."""
        with self._lock:
            for receipt in self._receipts:
                if receipt.fits(letter.kind, letter.source, letter.key):
                    self._receipts.remove(receipt)
                    receipt.source = letter.source
                    letter.receipt = receipt
                    break
            else:
                self._letters.append(letter)
        receipt_ = letter.receipt
        if receipt_ is not None and receipt_.problem(letter.source, letter.text, letter.length) is None:
            letter.room = receipt_.room
        else:
            letter.room = room_for(letter.length)

    def close(self, letter: Letter) -> None:
        """All of it is here."""
        with self._lock:
            letter.is_here = True
            wanted = letter.receipt is not None
        if wanted:
            self._hand_over(letter)

    def _hand_over(self, letter: Letter) -> None:
        receipt, room = letter.receipt, letter.room
        assert receipt is not None
        assert room is not None
        receipt.source = letter.source
        error = receipt.problem(letter.source, letter.text, letter.length)
        if error is None and room is not receipt.room:
            receipt.room[:] = room
        receipt.end(error)

    def give_up(self, receipt: Receipt, error: Exception) -> None:
        """It is not waited for any longer."""
        with self._lock:
            if receipt in self._receipts:
                self._receipts.remove(receipt)
        receipt.end(error)

    def fail(self, error: Exception, concerns: Callable[[Receipt], bool]) -> None:
        """These receipts can't be had any more."""
        with self._lock:
            failed = [receipt for receipt in self._receipts if concerns(receipt)]
            self._receipts = [receipt for receipt in self._receipts if receipt not in failed]
        for receipt in failed:
            receipt.end(error)
