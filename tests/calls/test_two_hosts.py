"""Two hosts: network namespaces joined by a cable that the test can cut."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import farprop.autograd as autograd
import farprop.rpc as rpc
from farprop.errors import RpcTimeoutError
from tests.autograd import functions as g
from tests.calls import functions as f
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


# A cable is cut. Calls end at their deadlines; the connection survives if the cable is mended.


def _wait_in_the_callee() -> str:
    _began.set()
    return f.wait_for_gate()


def _wait_until_begun() -> None:
    assert _began.wait(30)


def _call(timeout: float) -> None:
    with pytest.raises(RpcTimeoutError, match="worker1"):
        rpc.rpc_sync("worker1", _wait_in_the_callee, timeout=timeout)


def _more_calls() -> None:
    with pytest.raises(RpcTimeoutError, match="worker1"):
        rpc.rpc_sync("worker1", f.noop, timeout=0.5)
    with pytest.raises(RpcTimeoutError, match="worker1"):
        rpc.rpc_async("worker1", f.noop, timeout=0.5).wait()
    reference = rpc.remote("worker1", f.noop, timeout=0.5)
    with pytest.raises(RpcTimeoutError):
        reference.to_here(timeout=0.5)


def _name(timeout: float) -> Any:
    return rpc.rpc_sync("worker1", f.own_name, timeout=timeout)


def test_a_cut_during_a_call(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        call = job.start(0, _call, 5)
        job.run(1, _wait_until_begun)
        hosts.cut(1)
        call.result()
        job.run(0, _more_calls)
        hosts.mend(1)
        job.run(1, f.open_gate)
        # TCP retransmits after a while.
        assert job.run(0, _name, 50) == "worker1"


def _send_until_cut() -> None:
    tensor = torch.rand(2_000_000)
    with pytest.raises(RpcTimeoutError, match="worker1"):
        while True:
            assert torch.equal(rpc.rpc_sync("worker1", f.identity, args=(tensor,), timeout=3), tensor)
            _began.set()


def test_a_cut_while_tensors_are_sent(hosts: Hosts) -> None:
    with cluster(2, hosts.environments([0, 1])) as job:
        sending = job.start(0, _send_until_cut)
        job.run(0, _wait_until_begun)
        hosts.cut(1)
        sending.result()
        hosts.mend(1)
        assert job.run(0, _name, 50) == "worker1"
        job.run(0, _calls)


def _failing_pass() -> None:
    a = torch.ones(2, requires_grad=True)
    with autograd.context() as context_id:
        x = rpc.rpc_sync("worker1", g.at_gate, args=(a, "cut"))
        with pytest.raises(RpcTimeoutError):
            autograd.backward(context_id, [x.sum()], timeout=3)
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
