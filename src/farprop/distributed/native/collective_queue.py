"""Runs the collectives of a group one after the other, in the order of the calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from farprop.distributed.work import Work
from farprop.errors import without_frames
from farprop.locks import make_owned_lock

Job = Callable[[], None]


class CollectiveQueue:
    """Runs the collectives of one group.

    A collective runs in the calling thread if the caller waits for it and no other runs or waits. All others run in one
    thread, which the first of them starts.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Taken itself, not through the condition: that is Python code, and an interrupt there would keep the lock.
        self._lock = make_owned_lock("collective_queue")
        self._changed = threading.Condition(self._lock)  # type: ignore[arg-type]
        self._waiting: deque[tuple[Job, Work, Sequence[torch.Tensor]]] = deque()
        self._is_running = False
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def run_inline(self, job: Job) -> bool:
        """Run a job in this thread, and raise what it raises.

        Returns:
            Whether it was run; False if another job runs or waits.
        """
        is_ours = False
        try:
            with self._lock:
                if self._is_running or self._waiting:
                    return False
                # Nothing is called here, so an interrupt can't come between the two.
                self._is_running = is_ours = True
            job()
        finally:
            if is_ours:
                # Without the lock and before anything is called: a second interrupt must not leave the queue busy.
                self._is_running = False
                self._wake_thread()
        return True

    def _wake_thread(self) -> None:
        """Wake the thread if it has something to do."""
        with self._lock:
            if self._waiting:
                self._changed.notify_all()

    def enqueue(self, job: Job, work: Work, outputs: Sequence[torch.Tensor]) -> None:
        """Run a job in the queue's thread. ``work`` ends with it, with ``outputs`` or its error."""
        with self._lock:
            self._waiting.append((job, work, outputs))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _run(self) -> None:
        while self._run_once():
            pass  # a method of its own, so that this frame keeps no tensors alive

    def _run_once(self) -> bool:
        with self._lock:
            while self._is_running or not self._waiting:
                if self._is_closed and not self._waiting:
                    return False
                self._changed.wait()
            job, work, outputs = self._waiting.popleft()
            self._is_running = True
        failure = None
        try:
            job()
        except Exception as error:
            failure = without_frames(error)
        # Before the work ends: whoever waits for it may close the queue next, which must not look busy then.
        with self._lock:
            self._is_running = False
        if failure is None:
            work.complete(outputs)
        else:
            work.fail(failure)
        return True

    @property
    def is_busy(self) -> bool:
        """Whether a collective runs or waits."""
        with self._lock:
            return self._is_running or bool(self._waiting)

    def close(self) -> None:
        """Run the jobs that wait, then end the thread. The caller has to make a job fail that waits for other ranks."""
        with self._lock:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
