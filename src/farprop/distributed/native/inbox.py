"""What has come and was not asked for yet, and what was asked for and has not come."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

from farprop.distributed.native.frames import Kind
from farprop.errors import CollectiveError
from farprop.wire.room import room_for

# Of what one rank has sent and nobody here has asked for. Programs send ahead as they like, and so do roots of
# collectives; but what is over this fails the group, because it might never be asked for.
_MOST_LETTERS = 1_000_000
_MOST_BYTES = 1 << 30  # or the largest message that is taken, if that is more


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

    def __init__(self, max_length: int) -> None:
        self._most_bytes = max(_MOST_BYTES, max_length)
        self._counts: Counter[int] = Counter()  # of letters that nobody has asked for, by rank
        self._bytes: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._letters: deque[Letter] = deque()
        self._receipts: list[Receipt] = []

    def expect(self, receipt: Receipt) -> None:
        """Somebody wants this."""
        with self._lock:
            for letter in self._letters:
                if letter.receipt is None and receipt.fits(letter.kind, letter.source, letter.key):
                    self._letters.remove(letter)
                    self._counts[letter.source] -= 1
                    self._bytes[letter.source] -= letter.length
                    letter.receipt = receipt
                    break
            else:
                self._receipts.append(receipt)
                return
            is_here = letter.is_here
        if is_here:
            self._hand_over(letter)

    def open(self, letter: Letter) -> None:
        """A letter begins to come: give it room. Raises ``CollectiveError`` if too many have come already."""
        with self._lock:
            for receipt in self._receipts:
                if receipt.fits(letter.kind, letter.source, letter.key):
                    self._receipts.remove(receipt)
                    receipt.source = letter.source
                    letter.receipt = receipt
                    break
            else:
                self._keep(letter)
        receipt_ = letter.receipt
        if receipt_ is not None and receipt_.problem(letter.source, letter.text, letter.length) is None:
            letter.room = receipt_.room
        else:
            letter.room = room_for(letter.length)

    def _keep(self, letter: Letter) -> None:
        source, count, size = letter.source, self._counts[letter.source], self._bytes[letter.source]
        if count >= _MOST_LETTERS or (size and size + letter.length > self._most_bytes):
            raise CollectiveError(
                f"{count} messages of {size} bytes that rank {source} has sent were not received, and the next has "
                f"{letter.length} bytes. The most are {_MOST_LETTERS} messages and {self._most_bytes} bytes. Receive "
                "them, or have that rank wait before it sends more."
            )
        self._counts[source] += 1
        self._bytes[source] += letter.length
        self._letters.append(letter)

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
