"""Two hosts: network namespaces joined by a cable that the test can cut."""

from __future__ import annotations

import ctypes
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import ConnectionLostError, RpcTimeoutError
from tests.autograd import functions as g
from tests.calls import functions as f
from tests.references.functions import kept
from tests.references.looking import wait_until
from tests.support.hosts import Hosts
from tests.support.workers import cluster, run_workers

pytestmark = pytest.mark.one_transport  # these tests choose theirs

_began = threading.Event()


def _calls() -> None:
    assert rpc.api.current_agent()._own_entry.tcp[0] == "192.0.2.1"
    assert rpc.rpc_sync("worker1", f.own_name) == "worker1"
    tensor = torch.rand(2_000_000)
    assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(tensor,)), tensor)
    reference = rpc.remote("worker1", f.add, args=(tensor,))
    assert torch.equal(reference.to_here(), tensor + 1)
    _pass()


def _pass() -> None:
    a = torch.ones(500, 500, requires_grad=True)
    with autograd.context() as context_id:
        product = rpc.rpc_sync("worker1", torch.mul, args=(a, 3.0), timeout=50)
        autograd.backward(context_id, [product.sum()], timeout=50)
        assert torch.equal(autograd.get_gradients(context_id)[a], torch.full((500, 500), 3.0))


def test_calls_between_hosts(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        job.run(0, _calls)


def _refused(rank: int) -> None:
    with pytest.raises(RuntimeError, match="share no secret.*FARPROP_SECRET"):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)


def test_hosts_without_a_secret_refuse_and_say_how_to_set_one(hosts: Hosts, tmp_path: Path) -> None:
    environments: list[dict[str, str | None]] = []
    for host, environment in enumerate(hosts.environments([0, 1])):
        (place := tmp_path / str(host)).mkdir(mode=0o700)
        environments.append({**environment, "FARPROP_SECRET": None, "XDG_RUNTIME_DIR": str(place)})
    run_workers(_refused, 2, (), environments, check=False)


# A cable is cut. Open calls learn of it within two seconds, and nothing is lost but them if the cable is mended.


def _wait_in_the_callee() -> str:
    _began.set()
    return f.wait_for_gate()


def _wait_until_begun() -> None:
    assert _began.wait(30)


def _call(kind: str) -> None:
    with pytest.raises(ConnectionLostError, match="worker1"):
        if kind == "sync":
            rpc.rpc_sync("worker1", _wait_in_the_callee, timeout=0)
        elif kind == "async":
            rpc.rpc_async("worker1", _wait_in_the_callee, timeout=0).wait()
        else:
            rpc.remote("worker1", _wait_in_the_callee, timeout=0).to_here(timeout=0)


def _more_calls() -> None:
    with pytest.raises(RpcTimeoutError, match="worker1"):
        rpc.rpc_sync("worker1", f.noop, timeout=0.5)
    with pytest.raises(RpcTimeoutError, match="worker1"):
        rpc.rpc_async("worker1", f.noop, timeout=0.5).wait()
    with pytest.raises(RpcTimeoutError):
        rpc.remote("worker1", f.noop, timeout=0.5)


def _name(timeout: float) -> Any:
    return rpc.rpc_sync("worker1", f.own_name, timeout=timeout)


@pytest.mark.parametrize("kind", ["sync", "async", "remote"])
def test_a_cut_during_a_call_without_a_deadline(hosts: Hosts, kind: str) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        call = job.start(0, _call, kind)
        job.run(1, _wait_until_begun)
        hosts.cut(1)
        call.result()
        job.run(0, _more_calls)
        hosts.mend(1)
        job.run(1, f.open_gate)
        assert job.run(0, _name, 10) == "worker1"


def test_a_cut_while_nobody_calls(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        assert job.run(0, _name, 10) == "worker1"
        hosts.cut(1)
        with pytest.raises(ConnectionLostError, match="does not answer"):
            job.run(0, _name, 0)
        hosts.mend(1)
        assert job.run(0, _name, 10) == "worker1"


def _keep_a_reference() -> None:
    kept["thing"] = rpc.remote("worker1", f.add, args=(1,))
    assert kept["thing"].to_here() == 2


def _use_the_reference() -> int:
    return int(kept["thing"].to_here(timeout=10))


def _call_until_cut_for(seconds: float) -> int:
    """Each call ends in a typed error; returns their number."""
    calls = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with pytest.raises((ConnectionLostError, RpcTimeoutError)):
            rpc.rpc_sync("worker1", f.note, args=(calls,), timeout=4)
        calls += 1
    return calls


def test_calls_go_on_soon_after_a_long_cut_and_run_at_most_once(hosts: Hosts) -> None:
    """TCP's own next attempt would come more than ten seconds after the cut has ended."""
    with cluster(2, hosts.environments([0, 1])) as job:
        job.run(0, _keep_a_reference)
        job.run(0, rpc.rpc_sync, "worker1", f.note, ("before",))
        hosts.cut(1)
        calls = job.run(0, _call_until_cut_for, 14)
        hosts.mend(1)
        assert job.run(0, _name, 5) == "worker1"
        assert job.run(1, rpc.rpc_sync, "worker0", f.own_name, timeout=5) == "worker0"
        # Nobody was declared dead.
        assert job.run(0, _use_the_reference) == 2
        ran = job.run(1, f.noted)
        assert ran[0] == "before"
        assert len(set(ran)) == len(ran) <= calls + 1


def _is_probed() -> bool:
    return rpc.api.current_agent().peers.connect("worker1")._probe.is_due


def test_a_connection_is_probed_only_while_calls_are_open(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        call = job.start(0, rpc.rpc_sync, "worker1", _wait_in_the_callee, timeout=0)
        job.run(1, _wait_until_begun)
        assert job.run(0, _is_probed)
        job.run(1, f.open_gate)
        call.result()
        wait_until(lambda: not job.run(0, _is_probed))


# A worker that does not answer on a host that does


def _late_call(timeout: float) -> None:
    with pytest.raises(RpcTimeoutError):
        rpc.rpc_sync("worker1", f.noop, timeout=timeout)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_stopped_worker_is_not_lost(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        job.run(0, _keep_a_reference)
        endless = job.start(0, rpc.rpc_sync, "worker1", _wait_in_the_callee, timeout=0)
        job.run(1, _wait_until_begun)
        job.signal(1, signal.SIGSTOP)
        wait_until(lambda: _is_stopped(job.pid(1)))
        job.run(0, _late_call, 4)  # longer than a vanished host is waited for
        assert not endless.done()
        job.signal(1, signal.SIGCONT)
        job.run(1, f.open_gate)
        assert endless.result() == "through"
        assert job.run(0, _use_the_reference) == 2


def _hold_the_interpreter(seconds: int) -> str:
    ctypes.PyDLL(None).sleep(seconds)  # a function of C's that does not release the interpreter's lock
    return "held"


def test_a_worker_that_holds_the_interpreters_lock_is_not_lost(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        assert job.run(0, rpc.rpc_sync, "worker1", _hold_the_interpreter, (4,), timeout=0) == "held"


def _send_until_cut() -> None:
    tensor = torch.rand(2_000_000)
    with pytest.raises(ConnectionLostError, match="worker1"):
        while True:
            assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(tensor,), timeout=0), tensor)
            _began.set()


def test_a_cut_while_tensors_are_sent(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        sending = job.start(0, _send_until_cut)
        job.run(0, _wait_until_begun)
        hosts.cut(1)
        sending.result()
        hosts.mend(1)
        assert job.run(0, _name, 10) == "worker1"
        job.run(0, _calls)


def _failing_pass() -> None:
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        x = rpc.rpc_sync("worker1", g.at_gate, args=(a, "cut"))
        with pytest.raises(ConnectionLostError):
            autograd.backward(context_id, [x.sum()], timeout=0)
        assert not autograd.get_gradients(context_id)


def test_a_cut_during_a_backward_pass(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        failing = job.start(0, _failing_pass)
        wait_until(lambda: job.run(1, g.was_reached, "cut"))
        hosts.cut(1)
        failing.result()
        hosts.mend(1)
        job.run(1, g.open_gate, "cut")
        job.run(0, _pass)
        # Now that the other host is reachable, it cleans up the failed pass, too.
        for rank in range(2):
            job.run(rank, g.no_contexts_left)


def _shut_down() -> None:
    with pytest.raises(RpcTimeoutError):
        rpc.shutdown(timeout=2)


def test_shutdown_after_a_cut_ends_at_its_timeout(hosts: Hosts) -> None:
    """The same holds for a worker that has to dial the other one first."""
    with cluster(2, hosts.environments([0, 1])) as job:
        hosts.cut(1)
        for end in [job.start(rank, _shut_down) for rank in range(2)]:
            end.result()
