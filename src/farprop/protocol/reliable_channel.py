"""A channel between two workers on which each operation is executed exactly once, whatever happens to messages.

The protocol is stop-and-wait ARQ. One numbered batch at a time is on its way to a peer, and it is sent again until its
reply arrives. New operations wait for the next batch. So the receiver recognises a repeated batch by one number, and it
keeps one reply to send again. Batching makes up for the waiting: ten thousand operations take a handful of messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from farprop.protocol.references.messages import Batch, ControlReply, Operation

MAX_OPERATIONS = 4096


class ReliableSender:
    """The sending end: the operations for one peer."""

    def __init__(self) -> None:
        self._waiting: deque[Operation] = deque()
        self._batch: Batch | None = None  # sent, without a reply
        self._number = 0

    def add(self, operation: Operation) -> None:
        """Queue an operation for the next batch."""
        self._waiting.append(operation)

    def current(self) -> Batch | None:
        """The batch to send, or to send again; None if there is none."""
        if self._batch is None and self._waiting:
            self._number += 1
            count = min(len(self._waiting), MAX_OPERATIONS)
            self._batch = Batch(self._number, tuple(self._waiting.popleft() for _ in range(count)))
        return self._batch

    def replied(self, reply: ControlReply) -> Batch | None:
        """Take a reply.

        Returns:
            The batch that it belongs to; None if it is a duplicate of an earlier reply.
        """
        batch = self._batch
        if batch is None or batch.number != reply.number or len(reply.results) != len(batch.operations):
            return None
        self._batch = None
        return batch

    @property
    def empty(self) -> bool:
        """Every operation has its reply."""
        return self._batch is None and not self._waiting

    def operations(self) -> list[Operation]:
        """The operations without a reply, in order."""
        return [*(self._batch.operations if self._batch else ()), *self._waiting]


class ReliableReceiver:
    """The receiving end: the operations of one peer."""

    def __init__(self) -> None:
        self._last = ControlReply(0, b"")

    def take(self, batch: Batch, execute: Callable[[Operation], bool]) -> ControlReply:
        """Execute a batch, unless it was executed before.

        Args:
            batch: The batch that arrived.
            execute: Executes one operation; returns whether there was something to do it on.

        Returns:
            The reply to send. A repeated batch gets its first reply again, an older one an empty reply, which the
            sender ignores.
        """
        if batch.number == self._last.number + 1:
            self._last = ControlReply(batch.number, bytes([execute(operation) for operation in batch.operations]))
        if batch.number == self._last.number:
            return self._last
        return ControlReply(batch.number, b"")
