"""The end of this process because another worker has died: ``FARPROP_ON_FAILURE=end``."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from farprop.ids import WorkerInfo

_log = logging.getLogger(__name__)

EXIT_CODE = os.EX_UNAVAILABLE
_LINGER_SECONDS = 0.5  # the others shall see the first death before they see the end of this process
_CALLBACK_SECONDS = 5.0
_FLUSH_SECONDS = 1.0
_PAUSE = 0.005


class JobEnd:
    """Ends this process, once.

    Args:
        own: this worker.
        fail_calls: fails all open calls, and later ones, for a reason.
        has_told: whether all callbacks of the program have run.
        clean_up: removes the files of this worker.
    """

    def __init__(
        self,
        own: WorkerInfo,
        fail_calls: Callable[[str], None],
        has_told: Callable[[], bool],
        clean_up: Callable[[], None],
    ) -> None:
        self._own = own
        self._clean_up = clean_up
        self._fail_calls = fail_calls
        self._has_told = has_told
        self._has_begun = False

    def begin(self, dead: WorkerInfo, reason: str) -> None:
        """A worker has died. A second time does nothing."""
        if not self._has_begun:
            self._has_begun = True
            with suppress(RuntimeError):  # the interpreter is about to end
                atexit.register(self._exit)  # the main thread may end before this process is ended
            # A thread of its own: the pool's may be closed by ``shutdown`` meanwhile.
            name = f"farprop-end-{self._own.name}"
            threading.Thread(target=self._end, args=(dead, reason), name=name, daemon=True).start()

    def _end(self, dead: WorkerInfo, reason: str) -> None:
        began = time.monotonic()
        why = f"{dead.label} has died: {reason}"
        _log.error("%s ends with the exit code %d (FARPROP_ON_FAILURE=end). %s", self._own.label, EXIT_CODE, why)
        try:
            self._fail_calls(f"this worker ends, because {why}")
            while time.monotonic() < began + _CALLBACK_SECONDS and not self._has_told():
                time.sleep(_PAUSE)
            time.sleep(max(0.0, began + _LINGER_SECONDS - time.monotonic()))
        finally:
            self._exit()

    def _exit(self) -> None:
        try:
            self._clean_up()
            # A flush waits for ever if nobody reads the pipe, or if a thread that hangs has the lock of the stream.
            flush = threading.Thread(target=_flush, name="farprop-flush", daemon=True)
            try:
                flush.start()
            except RuntimeError:  # the interpreter is about to end, and starts no threads
                _flush()
            else:
                flush.join(_FLUSH_SECONDS)
        finally:
            os._exit(EXIT_CODE)


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
