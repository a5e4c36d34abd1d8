"""Warnings that somebody else can cause as often as he likes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

_FIRST = 5
_SECONDS = 10.0


class SparingLog:
    """The first few warnings are written; then one in ten seconds, which says how many were not. After ten seconds
    without any it starts anew.
    """

    def __init__(self, log: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._now = now
        self._lock = threading.Lock()
        self._in_a_row = 0
        self._unwritten = 0
        self._last_written = self._last = -_SECONDS

    def warning(self, text: str, *args: object) -> None:
        with self._lock:
            now = self._now()
            if now - self._last >= _SECONDS:
                self._in_a_row = 0
            self._last = now
            self._in_a_row += 1
            if self._in_a_row > _FIRST and now - self._last_written < _SECONDS:
                self._unwritten += 1
                return
            self._last_written = now
            unwritten, self._unwritten = self._unwritten, 0
        if unwritten:
            text, args = text + " (%d more like it since the last line)", (*args, unwritten)
        self._log.warning(text, *args)
