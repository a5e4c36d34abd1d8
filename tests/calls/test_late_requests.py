"""A request that waited unread in a stopped worker's kernel until its caller had given up does not run."""

from __future__ import annotations

import os
import signal
import threading

import pytest

import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from tests.calls import functions as f
from tests.references.looking import wait_until
from tests.support.workers import cluster


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as text:
        return text.read().rpartition(")")[2].split()[0]


def _call_while_it_is_stopped(pid: int) -> list[str]:
    rpc.rpc_sync("worker1", f.noop)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: _state(pid) == "T")
        calls = [rpc.rpc_async("worker1", f.note, args=(word,), timeout=0.3) for word in ("first", "second")]
        kept = rpc.rpc_async("worker1", f.note, args=("in time",), timeout=60)
        made = rpc.remote("worker1", f.note, args=("made",), timeout=0.3)
        for call in calls:
            with pytest.raises(RpcTimeoutError):
                call.wait()
        threading.Event().wait(0.3)  # the calls grow old
    finally:
        os.kill(pid, signal.SIGCONT)
    kept.wait()
    with pytest.raises(RpcTimeoutError):
        made.to_here()
    del made
    return rpc.rpc_sync("worker1", f.noted)  # type: ignore[no-any-return]


def test_late_requests_do_not_run(env: dict[str, str]) -> None:
    with cluster(2, env) as job:
        assert job.run(0, _call_while_it_is_stopped, job.pid(1)) == ["in time"]
