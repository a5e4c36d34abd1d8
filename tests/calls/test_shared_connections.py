"""Callers on pool threads and on other threads share one connection, and read answers for each other."""

from __future__ import annotations

import threading

import farprop.rpc as rpc
from tests.references.looking import wait_until
from tests.support.workers import cluster

_gates: dict[str, threading.Event] = {}
_at_gate: set[str] = set()


def _wait_at(gate: str) -> str:
    _at_gate.add(gate)
    _gates.setdefault(gate, threading.Event()).wait(60)
    return gate


def _is_at(gate: str) -> bool:
    return gate in _at_gate


def _open(gate: str) -> None:
    _gates.setdefault(gate, threading.Event()).set()


def _call_back(gate: str) -> str:
    """On a pool thread of worker0, make a call on the connection that its main thread also uses."""
    return rpc.rpc_sync("worker1", _wait_at, args=(gate,), timeout=20)  # type: ignore[no-any-return]


def _hand_over_reading() -> None:
    # The event loop reads this answer, so a pool thread that makes a call polls for the loop.
    kept_open = rpc.rpc_async("worker1", _wait_at, args=("first",))
    called = rpc.rpc_async("worker1", rpc.rpc_sync, args=("worker0", _call_back, ("second",)))
    # From a third thread: each of these calls becomes the reader, and hands over to the pool thread.
    wait_until(lambda: rpc.rpc_sync("worker1", _is_at, args=("second",)))
    for _ in range(50):
        rpc.rpc_sync("worker1", _is_at, args=("second",))
    rpc.rpc_sync("worker1", _open, args=("second",))
    assert called.wait() == "second"
    rpc.rpc_sync("worker1", _open, args=("first",))
    assert kept_open.wait() == "first"


def test_reading_is_handed_over_to_the_polling_thread(env: dict[str, str]) -> None:
    with cluster(2, env) as job:
        job.run(0, _hand_over_reading)
