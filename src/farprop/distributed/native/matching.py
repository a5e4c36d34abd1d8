"""Message matching: incoming messages are matched with posted receives, in the order of each.

As in MPI, there are two queues: receives that were posted before their message arrived, and *unexpected* messages,
which arrived before a receive for them was posted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from farprop.errors import CollectiveError
from farprop.locks import make_lock
from farprop.wire.frames import room_for

if TYPE_CHECKING:
    from farprop.distributed.native.framing import FrameKind

# Limits on the unexpected messages of one rank. Programs may send ahead, and so do roots of collectives. More than
# this breaks the group, because it might never be received.
_MAX_UNEXPECTED = 1_000_000
_MAX_UNEXPECTED_BYTES = 1 << 30  # or the largest message that is taken, if that is more


class PostedRecv:
    """A receive that somebody waits for.

    Args:
        kind: ``MESSAGE`` or ``COLLECTIVE``.
        source: the rank that sends; None for any. Once the message is matched, the rank that sent it.
        key: the tag of a message, or the number of the collective.
        buffer: where the data goes.
        text: what the sender has to name: the dtype of a message, or the fingerprint of the collective.
        on_done: called once, with the receive and an error or None.
    """

    def __init__(
        self,
        kind: FrameKind,
        source: int | None,
        key: int,
        buffer: memoryview,
        text: str,
        on_done: Callable[[PostedRecv, Exception | None], None],
    ) -> None:
        self.kind, self.source, self.key = kind, source, key
        self.buffer = buffer
        self.text = text
        self.message: IncomingMessage | None = None
        self._on_done = on_done
        self.is_done = False

    def matches(self, message: IncomingMessage) -> bool:
        """Whether this receive is for the message."""
        return (self.kind, self.key) == (message.kind, message.key) and self.source in (None, message.source)

    def mismatch(self, message: IncomingMessage) -> Exception | None:
        """Why the message, which matches, can't be received here; None if it can."""
        source = message.source
        if message.text != self.text:
            # Of a collective, nobody sees this text: such a message has broken the group. But whoever posts the receive
            # may have looked before that, and must not take the tensor of another collective for that of its own.
            return CollectiveError(
                f"Rank {source} sends a tensor of {message.text} where one of {self.text} is received."
            )
        if message.length != len(self.buffer):
            return CollectiveError(f"Rank {source} sends {message.length} bytes where {len(self.buffer)} are received.")
        return None

    def finish(self, error: Exception | None) -> None:
        """The receive has ended. Calls after the first have no effect.

        The thread that reads may call this at the same time as one that gives up. The interpreter does not release its
        lock between the check and the assignment.
        """
        if not self.is_done:
            self.is_done = True
            self._on_done(self, error)


class IncomingMessage:
    """A message whose header has arrived.

    Attributes:
        text: the dtype of a message, or the fingerprint of a collective.
        recv: the receive that it is matched with; None while it is unexpected.
        buffer: where its data goes: the receive's buffer, or memory of its own.
        is_complete: whether all of its data has arrived.
    """

    def __init__(self, kind: FrameKind, source: int, key: int, text: str, length: int) -> None:
        self.kind, self.source, self.key = kind, source, key
        self.text = text
        self.length = length
        self.buffer: memoryview = memoryview(b"")
        self.recv: PostedRecv | None = None
        self.is_complete = False


class MessageMatcher:
    """The two queues of one rank. Any thread may post; one thread reads messages.

    Args:
        max_bytes: the largest message that this rank takes.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max(_MAX_UNEXPECTED_BYTES, max_bytes)
        self._lock = make_lock("message_matcher")
        self._posted: list[PostedRecv] = []
        self._unexpected: deque[IncomingMessage] = deque()
        self._counts: Counter[int] = Counter()  # of unexpected messages, by rank
        self._bytes: Counter[int] = Counter()

    def post(self, recv: PostedRecv) -> None:
        """Post a receive: match it with the first unexpected message that fits, or queue it."""
        with self._lock:
            for message in self._unexpected:
                if recv.matches(message):
                    self._unexpected.remove(message)
                    self._counts[message.source] -= 1
                    self._bytes[message.source] -= message.length
                    message.recv, recv.message = recv, message
                    break
            else:
                self._posted.append(recv)
                return
            is_complete = message.is_complete
        if is_complete:
            self._deliver(message, recv)

    def begin(self, message: IncomingMessage) -> None:
        """The header of a message has arrived: match it, and give it a buffer.

        Raises:
            CollectiveError: its rank has sent too many messages that nobody has received.
        """
        with self._lock:
            for posted in self._posted:
                if posted.matches(message):
                    self._posted.remove(posted)
                    posted.source = message.source
                    message.recv, posted.message = posted, message
                    break
            else:
                self._keep(message)
        recv = message.recv
        if recv is not None and recv.mismatch(message) is None:
            message.buffer = recv.buffer
        else:
            message.buffer = room_for(message.length)

    def _keep(self, message: IncomingMessage) -> None:
        source, count, size = message.source, self._counts[message.source], self._bytes[message.source]
        if count >= _MAX_UNEXPECTED or (size and size + message.length > self._max_bytes):
            raise CollectiveError(
                f"{count} messages of {size} bytes that rank {source} has sent were not received, and the next has "
                f"{message.length} bytes. The limit is {_MAX_UNEXPECTED} messages and {self._max_bytes} bytes. Receive "
                "them, or have that rank wait before it sends more."
            )
        self._queue(message)

    def _queue(self, message: IncomingMessage) -> None:
        self._counts[message.source] += 1
        self._bytes[message.source] += message.length
        self._unexpected.append(message)

    def complete(self, message: IncomingMessage) -> None:
        """All of the message's data has arrived."""
        with self._lock:
            message.is_complete = True
            recv = message.recv
        if recv is not None:
            self._deliver(message, recv)

    def _deliver(self, message: IncomingMessage, recv: PostedRecv) -> None:
        recv.source = message.source
        error = recv.mismatch(message)
        if error is None and message.buffer is not recv.buffer:
            recv.buffer[:] = message.buffer
        recv.finish(error)
        recv.message = None  # the two refer to each other, and one of them to the memory of a tensor

    def cancel(self, recv: PostedRecv, move: Callable[[IncomingMessage], None]) -> bool:
        """Take a receive back. Its message is unexpected if it comes later, or is arriving now.

        Args:
            recv: the receive. The caller ends it.
            move: called with a message that is arriving in the receive's memory: has it arrive elsewhere.

        Returns:
            False if the receive has ended, or all of its message is there, and it ends with that.
        """
        with self._lock:
            if recv.is_done:
                return False
            message = recv.message
            if recv in self._posted:
                self._posted.remove(recv)
            elif message is not None:
                if message.is_complete:
                    return False
                if message.buffer is recv.buffer:
                    move(message)
                message.recv = recv.message = None
                self._queue(message)
        return True

    def fail(self, error: Exception, concerns: Callable[[PostedRecv], bool]) -> None:
        """End with an error all posted receives for which ``concerns`` returns True."""
        with self._lock:
            failed = [recv for recv in self._posted if concerns(recv)]
            self._posted = [recv for recv in self._posted if recv not in failed]
        for recv in failed:
            recv.finish(error)
