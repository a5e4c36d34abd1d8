"""Collectives one after the other, in the order of the calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from farprop.distributed.calling import NO_TIMEOUT
from farprop.distributed.work import Work
from farprop.errors import without_frames

Job = Callable[[], None]


class Order:
    """A job runs in the calling thread if that waits for it and nothing is before it; else in a thread for all others,
    which the first of them starts.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._change = threading.Condition()
        self._waiting: deque[tuple[Job, Work, Sequence[torch.Tensor]]] = deque()
        self._is_running = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def run_here(self, job: Job) -> bool:
        """Run it, and raise what it raises; False if something is before it."""
        with self._change:
            if self._is_running or self._waiting:
                return False
            self._is_running = True
        try:
            job()
        finally:
            with self._change:
                self._is_running = False
                if self._waiting:
                    self._change.notify_all()
        return True

    def run_later(self, job: Job, work: Work, outputs: Sequence[torch.Tensor]) -> None:
        """The work ends as the job does."""
        with self._change:
            self._waiting.append((job, work, outputs))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            self._change.notify_all()

    def _work(self) -> None:
        while self._work_once():
            pass

    def _work_once(self) -> bool:
        with self._change:
            while self._is_running or not self._waiting:
                if self._is_closed and not self._waiting:
                    return False
                self._change.wait()
            job, work, outputs = self._waiting.popleft()
            self._is_running = True
        failure = None
        try:
            job()
        except Exception as error:
            failure = without_frames(error)
        # First this: whoever waits for the work may close the order next, and nothing is under way then.
        with self._change:
            self._is_running = False
        if failure is None:
            work.complete(outputs)
        else:
            work.fail(failure)
        return True

    @property
    def is_busy(self) -> bool:
        with self._change:
            return self._is_running or bool(self._waiting)

    def close(self) -> None:
        """Jobs that wait still run; if they can't end, somebody has to make them fail."""
        with self._change:
            self._is_closed = True
            self._change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


class Done(Work):
    """The work of what was done before the call returned. Few ask for its future, so it is made when they do."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        dist.Work.__init__(self)
        self._outputs = outputs

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(list(self._outputs))
        return future

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)
