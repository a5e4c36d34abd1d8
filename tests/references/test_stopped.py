"""A stopped worker is not dead: calls to it fail at their deadlines, and nothing else is affected."""

from __future__ import annotations

import signal
import time

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RpcTimeoutError
from farprop.testing import faults
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import all_empty, drop_all
from tests.support.workers import cluster


def _use_while_stopped() -> None:
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError):
        g.kept["number"].to_here(timeout=0.3)
    with pytest.raises(RpcTimeoutError):
        g.kept["value"].rpc_sync(timeout=0.3).plus(1)
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker2", f.identity, args=(g.kept["number"],), timeout=0.3)  # its owner does not confirm it
    assert 0.9 <= time.monotonic() - began < 10
    for key in ("value", "number"):
        assert g.kept_state(key) == "CONFIRMED"


def _use_after_continuing() -> None:
    assert g.kept["number"].to_here() == 2
    assert g.kept["value"].rpc_sync().plus(1) in (1, 2)  # the call that timed out may have run, or not
    assert rpc.rpc_sync("worker2", g.to_here, args=(g.kept["number"],)) == 2
    rpc.rpc_sync("worker1", g.open_gate, args=("never",))


def test_a_stopped_worker_is_not_dead(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, g.keep_some, "worker1", "worker2")
        c.signal(1, signal.SIGSTOP)
        c.run(0, _use_while_stopped)
        c.signal(1, signal.SIGCONT)
        c.run(0, _use_after_continuing)
        for rank in (0, 2):
            c.run(rank, drop_all)
        all_empty(c)


def _cut_and_use() -> float:
    with faults.inject() as plan:
        plan.cut_at("worker1", 1)
        began = time.monotonic()
        with pytest.raises(RpcTimeoutError):
            g.kept["number"].to_here(timeout=0.5)
        plan.cut_at("worker1", 1)
        with pytest.raises((RpcTimeoutError, ConnectionLostError)):
            g.kept["value"].rpc_sync(timeout=0.5).plus(1)
        return time.monotonic() - began


def test_probing_a_stopped_owner_ends_at_the_deadline(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, g.keep_some, "worker1", "worker2")
        c.signal(1, signal.SIGSTOP)
        assert c.run(0, _cut_and_use) < 8
        c.signal(1, signal.SIGCONT)
        c.run(0, _use_after_continuing)
        for rank in (0, 2):
            c.run(rank, drop_all)
        all_empty(c)
