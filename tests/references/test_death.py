"""The owner dies: its values are lost, and all workers that refer to them get an error at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, ReferenceLostError
from tests.calls import functions as f
from tests.references import functions as g
from tests.references.looking import drop_all, wait_until
from tests.support.workers import cluster


def _wait_for_answers_in_threads() -> tuple[list[str], float]:
    """Four threads wait for answers of a worker that dies."""
    rref = g.kept["pending"]
    errors: dict[Any, BaseException] = {}

    def wait(use: Any) -> None:
        try:
            use()
        except BaseException as error:
            errors[use] = error

    uses = [rref.to_here, rref.rpc_sync().anything, lambda: rref.rpc_async().anything().wait(), rref._get_type]
    threads = [threading.Thread(target=wait, args=(use,)) for use in uses]
    for thread in threads:
        thread.start()
    wait_until(lambda: int(rpc._get_debug_info()["agent.client_active_calls"]) >= 5)
    g.kept["waiting"] = True
    began = time.monotonic()
    for thread in threads:
        thread.join()
    assert all(isinstance(error, ConnectionLostError) for error in errors.values())
    return [type(errors[use]).__name__ for use in uses[:2]], time.monotonic() - began


def _is_waiting() -> bool:
    return bool(g.kept.get("waiting"))


def _every_use_raises(*keys: str) -> None:
    for key in keys:
        rref = g.kept[key]
        wait_until(lambda: g.kept_state(key) == "VOID")  # noqa: B023
        began = time.monotonic()
        for use in (
            rref.to_here,
            rref.rpc_sync().plus,
            rref.rpc_async().plus,
            rref.remote().plus,
            rref._get_type,
            lambda: rpc.rpc_sync("worker0", f.identity, args=(rref,)),  # noqa: B023
            lambda: rpc.rpc_async("worker2", f.identity, args=([rref],)),  # noqa: B023
            lambda: rpc.remote("worker2", f.identity, args=([rref],)),  # noqa: B023
        ):
            with pytest.raises(ReferenceLostError, match="worker1"):
                use()
        assert time.monotonic() - began < 5
        assert rref.owner_name() == "worker1"
        assert not rref.is_owner()
        assert not rref.confirmed_by_owner()
        assert ": void" in repr(rref)
    assert rpc.rpc_sync("worker0", f.add, args=(1,)) == 2  # the living go on


def _use_before_detection() -> float:
    """Use the references before any worker has detected the death."""
    began = time.monotonic()
    with pytest.raises(ReferenceLostError, match="worker1"):
        g.kept["number"].to_here()
    with pytest.raises(ReferenceLostError, match="worker1"):
        g.kept["value"].rpc_sync().plus(1)
    with pytest.raises(ConnectionLostError):
        rpc.remote("worker1", f.noop)
    return time.monotonic() - began


def test_all_uses_raise_when_the_owner_dies(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, g.keep_some, "worker1", "worker2")
        waiting = c.start(0, _wait_for_answers_in_threads)
        wait_until(lambda: c.run(0, _is_waiting))
        c.kill(1)
        assert c.run(0, _use_before_detection) < 10
        names, seconds = waiting.result()
        assert names == ["ReferenceLostError", "ReferenceLostError"]
        assert seconds < 10
        c.run(0, _every_use_raises, "value", "number", "pending")
        c.run(2, _every_use_raises, "passed")
        for rank in (0, 2):
            c.run(rank, drop_all)


def test_a_proxy_call_is_the_first_use_after_the_owners_death(env: dict[str, str]) -> None:
    with cluster(2, env) as c:
        c.run(0, _keep_one)
        c.kill(1)
        c.run(0, _first_use_through_a_proxy)


def _keep_one() -> None:
    g.kept["value"] = rpc.remote("worker1", g.Thing)
    assert g.kept["value"].rpc_sync().plus(1) == 1


def _first_use_through_a_proxy() -> None:
    with pytest.raises(ReferenceLostError, match="worker1"):
        g.kept["value"].rpc_sync().plus(1)
    drop_all()


def _shutdown_error() -> tuple[str, float]:
    began = time.monotonic()
    try:
        rpc.shutdown()
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    return "no error", time.monotonic() - began


def test_graceful_shutdown_of_the_survivors_ends(env: dict[str, str]) -> None:
    with cluster(3, env) as c:
        c.run(0, g.keep_some, "worker1", "worker2")
        c.kill(1)
        ends = [c.start(rank, _shutdown_error).result(30) for rank in (0, 2)]
    assert any("worker1" in text for text, _ in ends)
    assert all(seconds < 20 for _, seconds in ends)
