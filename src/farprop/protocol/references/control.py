"""Operations between two workers, each done exactly once, whatever the network does with the messages.

One batch at a time is on its way to a peer, and is sent again until it is answered; operations that come meanwhile wait
for the next one. So the receiver needs to remember one number and one reply to recognise what it has had already, and
ten thousand operations travel in a handful of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from farprop.protocol.references.messages import Batch, Operation, Reply

MAX_OPERATIONS = 4096


class Outbox:
    """The operations for one peer."""

    def __init__(self) -> None:
        self._waiting: deque[Operation] = deque()
        self._batch: Batch | None = None
        self._number = 0

    def add(self, operation: Operation) -> None:
        self._waiting.append(operation)

    def current(self) -> Batch | None:
        """The batch to send, or to send again; None if there is nothing to say."""
        if self._batch is None and self._waiting:
            self._number += 1
            count = min(len(self._waiting), MAX_OPERATIONS)
            self._batch = Batch(self._number, tuple(self._waiting.popleft() for _ in range(count)))
        return self._batch

    def replied(self, reply: Reply) -> Batch | None:
        """The batch that this is the first reply to; None if it is an old one."""
        batch = self._batch
        if batch is None or batch.number != reply.number or len(reply.results) != len(batch.operations):
            return None
        self._batch = None
        return batch

    @property
    def empty(self) -> bool:
        return self._batch is None and not self._waiting

    def operations(self) -> list[Operation]:
        return [*(self._batch.operations if self._batch else ()), *self._waiting]


class Inbox:
    """What one peer has asked for."""

    def __init__(self) -> None:
        self._last = Reply(0, b"")

    def take(self, batch: Batch, do: Callable[[Operation], bool]) -> Reply:
        """Do the operations of a new batch. One that was done already is answered as before, an older one emptily."""
        if batch.number == self._last.number + 1:
            self._last = Reply(batch.number, bytes([do(operation) for operation in batch.operations]))
        if batch.number == self._last.number:
            return self._last
        return Reply(batch.number, b"")
