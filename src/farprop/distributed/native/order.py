"""Collectives one after the other, in the order of the calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Job = Callable[[], None]


class Order:
    """A job runs in the calling thread if it may and nothing is before it, else in a thread that the first one starts.

    Jobs don't raise.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._change = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._is_running = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def run(self, job: Job, may_wait: bool) -> None:
        """``may_wait``: the caller will wait for it anyway."""
        with self._change:
            is_here = may_wait and not self._is_running and not self._jobs
            if is_here:
                self._is_running = True
            else:
                self._jobs.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                    self._thread.start()
                self._change.notify_all()
        if is_here:
            try:
                job()
            finally:
                with self._change:
                    self._is_running = False
                    if self._jobs:
                        self._change.notify_all()

    def _work(self) -> None:
        while True:
            with self._change:
                while self._is_running or not self._jobs:
                    if self._is_closed and not self._jobs:
                        return
                    self._change.wait()
                job = self._jobs.popleft()
                self._is_running = True
            try:
                job()
            finally:
                # Nothing of the job is kept while the next one is waited for.
                del job
                with self._change:
                    self._is_running = False

    def close(self) -> None:
        """Jobs that wait still run; whoever closes makes sure that they can."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
