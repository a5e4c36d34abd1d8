"""Looks at a job again and again, while somebody watches."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from farprop.dashboard.picture import Part, Picture, State
from farprop.dashboard.sources import JobEnded, Source
from farprop.errors import FarpropError
from farprop.locks import make_owned_lock

_log = logging.getLogger(__name__)

INTERVAL_SECONDS = 1.0
_SHARE = 5  # a look that takes long is made less often: it may take a fifth of the time
_MOST_PAUSE_SECONDS = 2.0  # but a worker that does not answer must not make the page slow

Publish = Callable[[State | None, Part | None, str], None]


class Poller:
    """One thread, however many browsers are open.

    Args:
        source: answers.
        publish: is called on the thread of the poller with each new picture, what it adds, and a note if something is
            wrong.
    """

    def __init__(self, source: Source, publish: Publish) -> None:
        self._source = source
        self._publish = publish
        self._picture = Picture()
        self._changed = threading.Condition(make_owned_lock("dashboard_poller"))  # type: ignore[arg-type]
        self._watchers = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="farprop-dashboard-poller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def watch(self, change: int) -> None:
        """One watches more (1) or less (-1). Waits for nothing."""
        with self._changed:
            self._watchers += change
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._watchers)
                if self._closed:
                    return
            began = time.monotonic()
            self._look()
            took = time.monotonic() - began
            pause = min(max(INTERVAL_SECONDS, _SHARE * took) - took, _MOST_PAUSE_SECONDS)
            with self._changed:
                self._changed.wait_for(lambda: self._closed, timeout=pause)

    def _look(self) -> None:
        try:
            job, told = self._source.look(self._picture.cursors)
        except JobEnded:
            self._picture.end()
            self._publish(self._picture.state, None, "")
            return
        except (FarpropError, OSError) as error:
            self._publish(None, None, f"The job could not be asked: {error}")
            return
        except Exception:
            _log.exception("farprop: unexpected error of the live page")
            self._publish(None, None, "The job could not be asked: an unexpected error, which is in the log.")
            return
        if self._picture.state is not None and self._picture.state.id != job.id:
            self._picture = Picture()
        part = self._picture.look(job, told, time.time())
        self._publish(self._picture.state, part, "")
