"""The log lines of a call, on both workers. Each names the worker and its rank."""

from __future__ import annotations

import logging
import re
import threading

import pytest
import torch

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from tests.calls import functions as f
from tests.support.workers import cluster

pytestmark = pytest.mark.one_transport

_lines: list[str] = []


class _RecordingHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _lines.append(f"{record.name}: {record.getMessage()}")


def _record_logs() -> None:
    logger = logging.getLogger("farprop")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(_RecordingHandler())
    logger.propagate = False


def _recorded() -> list[str]:
    logging.getLogger("farprop").setLevel(logging.WARNING)
    return _lines


def _call_and_backward() -> None:
    with dist_autograd.context() as context_id:
        x = torch.ones(2, requires_grad=True)
        dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.neg, (x,)).sum()])


def test_debug_logs_follow_a_call_and_a_backward_pass_on_both_workers() -> None:
    with cluster(2) as c:
        for rank in (0, 1):
            c.run(rank, _record_logs)
        c.run(0, _call_and_backward)
        caller, callee = ("\n".join(c.run(rank, _recorded)) for rank in (0, 1))
    for pattern in (
        r"client_connection: worker0 \(rank 0\): sends call (\d+) to worker1 \(rank 1\): torch:neg\n(.*\n)*?"
        r".*answer_reader: worker0 \(rank 0\): call \1 is answered by worker1 \(rank 1\)",
        r"client_connection: worker0 \(rank 0\): sends call \d+ to worker1 \(rank 1\): gradients",
        r"farprop\.runtime\.autograd\.driver: worker0 \(rank 0\): backward pass \d+ of context \d+ begins",
    ):
        assert re.search(pattern, caller), caller
    for pattern in (
        r"server: worker1 \(rank 1\): has call (\d+) of worker0 \(rank 0\)\n"
        r".*server: worker1 \(rank 1\): runs call \1 of worker0 \(rank 0\): torch:neg\n"
        r".*server: worker1 \(rank 1\): answers call \1 of worker0 \(rank 0\)",
        r"server: worker1 \(rank 1\): runs call \d+ of worker0 \(rank 0\): gradients",
        r"farprop\.runtime\.autograd\.driver: worker1 \(rank 1\): gradients of pass .* from rank 0",
    ):
        assert re.search(pattern, callee), callee


def _call_while_the_lock_of_logging_is_held() -> int:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with logging._lock:  # type: ignore[attr-defined]
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        return int(rpc.rpc_sync("worker1", f.add, args=(1,)))
    finally:
        done.set()
        thread.join()


def test_calls_do_not_need_the_lock_of_logging() -> None:
    """An interrupt in ``logging`` may keep it for ever."""
    with cluster(2, timeout=20) as c:
        assert c.run(0, _call_while_the_lock_of_logging_is_held) == 2
