"""Dynamic groups: references to a worker that leaves, and to its name after another process has joined with it."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import farprop.rpc as rpc
from farprop.errors import ReferenceLostError
from farprop.runtime.agent_registry import current_agent
from tests.references import functions as g
from tests.references.looking import become_empty, validate, wait_until
from tests.support.workers import run_workers


def _start(rank: int, path: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=10)
    rpc.init_rpc(f"worker{rank}", rank=rank, rpc_backend_options=options)


def _wait_for(path: str) -> None:
    wait_until(Path(path).exists, path)


def _refresh() -> list[str]:
    return sorted(info.name for info in current_agent().get_worker_infos())


def _every_use_raises(rref: Any) -> None:
    for use in (rref.to_here, rref.rpc_sync().plus, rref.rpc_async().plus, rref._get_type):
        with pytest.raises(ReferenceLostError):
            use()


def _shut_down_soon(path: str) -> None:
    """A graceful shutdown, which has to end soon."""
    g.kept.clear()
    become_empty()
    began = time.monotonic()
    rpc.shutdown(timeout=10)
    assert time.monotonic() - began < 8
    Path(path).touch()


def _leaver(path: str, graceful: bool) -> None:
    _wait_for(f"{path}.0")
    _start(1, path)
    rpc.rpc_sync("worker0", g.keep, args=("left", rpc.RRef(5)))
    rpc.rpc_sync("worker0", g.keep, args=("unused", rpc.RRef(6)))
    if graceful:
        rpc.shutdown(timeout=10)
    else:
        # First the store learns that it has left, then worker0 refreshes, then the connections close.
        current_agent().leave()
        assert rpc.rpc_sync("worker0", _refresh) == ["worker0"]
        rpc.shutdown(graceful=False)
    Path(f"{path}.left").touch()


def _hold_reference_to_leaver(path: str) -> None:
    _start(0, path)
    Path(f"{path}.0").touch()
    _wait_for(f"{path}.left")
    wait_until(lambda: g.kept_state("left") == g.kept_state("unused") == "VOID")
    validate()
    _every_use_raises(g.kept["left"])
    _shut_down_soon(f"{path}.end")


def _leave_or_hold(rank: int, path: str, graceful: bool) -> None:
    if rank == 0:
        _hold_reference_to_leaver(path)
    else:
        _leaver(path, graceful)


@pytest.mark.one_transport
@pytest.mark.parametrize("graceful", [True, False])
def test_references_to_a_worker_that_has_left_are_void(transport: str, graceful: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_workers(_leave_or_hold, 2, (f"{directory}/meet", graceful), {"FARPROP_TRANSPORT": transport})


def _successor(path: str) -> None:
    """Another process with the same name and rank."""
    _wait_for(f"{path}.left")
    _start(1, path)
    own = rpc.RRef("of the second")
    rpc.rpc_sync("worker0", g.keep, args=("back", own))
    wait_until(lambda: rpc.rpc_sync("worker0", g.kept_state, args=("back",)) == "CONFIRMED")
    wait_until(lambda: current_agent().references.settled, "worker0 has accepted it")
    assert rpc.rpc_sync("worker0", g.kept_value, args=("back",)) == "of the second"
    thing = rpc.remote("worker0", g.Thing, args=("made for the second",))
    assert thing.rpc_sync().plus(3) == 3
    rpc.rpc_sync("worker0", g.keep, args=("round trip", thing))
    # worker0 has not declared this worker dead because of its predecessor.
    assert rpc.rpc_sync("worker0", _dead) == []
    assert rpc.rpc_sync("worker0", g.kept_state, args=("left",)) == "VOID"
    assert rpc.rpc_sync("worker0", g.kept_state, args=("back",)) == "CONFIRMED"
    del thing, own
    Path(f"{path}.used").touch()
    _wait_for(f"{path}.dropped")
    become_empty()
    rpc.shutdown(timeout=10)
    Path(f"{path}.end1").touch()


def _dead() -> list[int]:
    return sorted(current_agent().references._machine.dead)


def _hold_references_to_both(path: str) -> None:
    _start(0, path)
    Path(f"{path}.0").touch()
    _wait_for(f"{path}.used")
    with pytest.raises(ReferenceLostError):
        g.kept["left"].to_here()
    assert g.kept["back"].to_here() == "of the second"
    g.kept.clear()
    become_empty()
    Path(f"{path}.dropped").touch()
    _wait_for(f"{path}.end1")
    _shut_down_soon(f"{path}.end")


def _leave_and_replace(process: int, path: str) -> None:
    if process == 0:
        _hold_references_to_both(path)
    elif process == 1:
        _leaver(path, graceful=True)
    else:
        _successor(path)


def test_references_after_another_process_has_taken_the_name(env: dict[str, str]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_workers(_leave_and_replace, 3, (f"{directory}/meet",), env)
