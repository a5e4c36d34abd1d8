"""An interrupt in the queue of collectives does not leave its lock held, nor the queue busy."""

from __future__ import annotations

import threading

import pytest
import torch

from farprop import locks
from farprop.distributed.native.collective_queue import CollectiveQueue
from farprop.distributed.work import Work
from tests.interrupts.points import Interrupts


class QueueInterrupts(Interrupts):
    """Also interrupts Python's own locks and conditions."""

    sources = (*Interrupts.sources, threading.__file__)


def _use(queue: CollectiveQueue) -> None:
    queue.run_inline(lambda: None)
    assert not queue.is_busy


def test_queue_is_usable_after_an_interrupt_at_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "factory", None)  # those of the tests are Python code
    queue = CollectiveQueue("queue")
    with QueueInterrupts()() as run:
        _use(queue)
    points = list(run.points)
    assert len(points) > 10
    for point in points:
        interrupts = QueueInterrupts(point)
        try:
            with interrupts():
                _use(queue)
        except KeyboardInterrupt:
            pass
        assert _still_works(queue), f"not usable any more after an interrupt: {point}"
    queue.close()


def _still_works(queue: CollectiveQueue) -> bool:
    """Whether another thread can use the queue: this one may hold its lock, which is reentrant."""
    worked = threading.Event()

    def run() -> None:
        work = Work()
        queue.enqueue(lambda: None, work, [torch.zeros(1)])
        work.wait()
        worked.set()

    threading.Thread(target=run, daemon=True).start()
    return worked.wait(10)
