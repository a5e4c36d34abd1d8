"""The requests that wait to be run: the callers take turns.

A caller that has queued many requests must not keep the others waiting, so requests run round robin by caller, and in
the order of their arrival for each of them. Sorting costs time, so it is done only while the queue is long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Request = tuple[int, Callable[..., None], tuple[Any, ...]]  # the rank of the caller; a function and its arguments

OWN = -1  # in place of the rank: continues requests that have run before

LONG = 8  # with more requests than this they are sorted by caller
_MARK: Request = (OWN, print, ())  # the end of what is being sorted; never run


class RequestQueue:
    """``waiting`` has the requests that run next, and behind them those that have arrived meanwhile.

    Arrivals are appended to ``waiting`` by any thread: to append is atomic. It is empty only if nothing waits at all.
    Everything else needs the lock of the pool.
    """

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()
        self.dealt = 0  # how many at the front of ``waiting`` were sorted
        self._backlog: dict[int, deque[Request]] = {}  # by caller; the first of them has the next turn

    def __len__(self) -> int:
        return len(self.waiting) + sum(map(len, self._backlog.values()))

    def pop_sorted(self) -> Request:
        """Take the request that runs next, if some were sorted or more than ``LONG`` wait.

        Otherwise the next one is just the first of ``waiting``.
        """
        if not self.dealt:
            self.waiting.append(_MARK)
            self._deal()
        self.dealt -= 1
        if self.dealt or not self._backlog:
            return self.waiting.popleft()
        self.waiting.append(_MARK)
        request = self.waiting.popleft()
        self._deal()
        return request

    def _deal(self) -> None:
        """Sort the arrivals up to the mark by caller, and put the next requests of each caller to the front.

        The mark goes in first and comes out last: other threads look without the lock whether anything waits.
        """
        waiting, backlog = self.waiting, self._backlog
        while (request := waiting[0]) is not _MARK:
            waiting.popleft()
            queue = backlog.get(request[0])
            if queue is None:
                queue = backlog[request[0]] = deque()
            queue.append(request)
        share = max(1, LONG // len(backlog))
        turn: list[Request] = []
        for rank, queue in list(backlog.items()):
            turn.extend([queue.popleft() for _ in range(min(share, len(queue)))])
            if not queue:
                del backlog[rank]
        waiting.extendleft(reversed(turn))
        self.dealt = len(turn)
        del waiting[self.dealt]

    def all(self) -> list[Request]:
        """What waits. To copy a deque is atomic, so arrivals do no harm."""
        return [*self.waiting.copy(), *(request for queue in self._backlog.values() for request in queue)]

    def clear(self) -> None:
        self.waiting.clear()
        self._backlog.clear()
        self.dealt = 0
