"""Wakes asyncio tasks from other threads: completions for one loop, many in one wake-up.

``call_soon_threadsafe`` writes a byte to a socket of the loop each time. A thousand answers come within a few
milliseconds, so what a loop has not taken yet is collected, and the loop is woken once for all of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

_this_thread = threading.local()


class LoopInbox:
    """What other threads have completed for one asyncio loop: futures of that loop, which are to be done.

    ``put`` may be called from any thread. There is no lock: to append to a deque and to read or write an attribute is
    atomic. Whoever puts something looks at ``_is_due`` after that, and the loop resets it before it takes anything, so
    no wake-up is lost. Two may be made where one would do.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._done: deque[asyncio.Future[None]] = deque()
        self._is_due = False

    def put(self, waiter: asyncio.Future[None], _: object = None) -> None:
        """Complete a future of the loop, on the loop's own thread. Nothing happens if the loop is closed.

        The second argument is for torch, which passes callbacks the future that is done.
        """
        self._done.append(waiter)
        if self._is_due:
            return
        self._is_due = True
        try:
            self.loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop is closed, and all of its tasks have ended
            self._done.clear()
        except BaseException:
            self._is_due = False  # Ctrl-C: perhaps the loop was not told
            self.loop.call_soon_threadsafe(self._take)
            raise

    def _take(self) -> None:
        self._is_due = False
        try:
            # Not more than there are now: others want the loop, too.
            for _ in range(len(self._done)):
                waiter = self._done.popleft()
                try:
                    waiter.set_result(None)
                except asyncio.InvalidStateError:
                    pass  # its task was cancelled; to look first would not do, Ctrl-C may cancel it after that
        except BaseException:
            self.loop.call_soon(self._take)  # Ctrl-C
            raise


def running_inbox() -> LoopInbox:
    """The inbox of the loop that runs on this thread.

    Raises:
        RuntimeError: No loop runs here.
    """
    loop = asyncio.get_running_loop()
    inbox: LoopInbox | None = getattr(_this_thread, "inbox", None)
    if inbox is None or inbox.loop is not loop:
        inbox = _this_thread.inbox = LoopInbox(loop)
    return inbox
