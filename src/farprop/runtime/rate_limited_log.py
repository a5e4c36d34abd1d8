"""Rate-limited warnings, for events that a peer can cause at any rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from farprop.locks import make_lock

_FIRST = 5
_SECONDS = 10.0


class RateLimitedLog:
    """Writes the first few warnings, then one every ten seconds with the number of suppressed ones.

    After ten seconds without a warning it starts again.
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now = now
        self._lock = make_lock("rate_limited_log")
        self._in_a_row = 0
        self._left_out = 0
        self._last_written = self._last = -_SECONDS

    def warning(self, text: str, *args: object) -> None:
        """Log a warning like ``Logger.warning``, unless there were too many."""
        with self._lock:
            now = self._now()
            if now - self._last >= _SECONDS:
                self._in_a_row = 0
            self._last = now
            self._in_a_row += 1
            if self._in_a_row > _FIRST and now - self._last_written < _SECONDS:
                self._left_out += 1
                return
            self._last_written = now
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text, args = text + " (%d more like it since the last line)", (*args, left_out)
        self._log.warning(text, *args)
