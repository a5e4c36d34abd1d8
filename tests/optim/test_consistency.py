"""Steps of one trainer while the pass of another needs the parameters."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import BackwardError, RpcTimeoutError, UsageError
from farprop.optim import DistributedOptimizer
from farprop.runtime.agent_registry import current_agent
from tests.optim.models import in_threads
from tests.references.looking import wait_until
from tests.support.workers import Cluster, cluster

LR = 0.5


class Server:
    """Parameters, in layers that save them in several ways."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.linear = nn.Linear(3, 3)
        self.w = nn.Parameter(torch.rand(3, 3, generator=generator))
        with torch.no_grad():
            for parameter in self.linear.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.w[1:]  # a view of a parameter
        return torch.tanh(self.linear(x) * self.w.sum(0)) @ self.w.t() + (x * rows[0] * self.w[0])

    def checkpointed(self, x: Tensor) -> Tensor:
        return checkpoint(self.forward, x, use_reentrant=False)  # type: ignore[no-any-return]

    async def forward_later(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def parameters(self) -> list[nn.Parameter]:
        return [self.w, *self.linear.parameters()]

    def references(self) -> list[rpc.RRef[nn.Parameter]]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def gradients(self, context_id: int) -> list[Tensor]:
        found = dist_autograd.get_gradients(context_id)
        return [found[parameter] for parameter in self.parameters()]

    def reset(self) -> None:
        fresh = Server()
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), fresh.parameters(), strict=True):
                parameter.copy_(value)


def _input(number: int = 0) -> Tensor:
    return torch.rand(2, 3, generator=torch.Generator().manual_seed(number)).requires_grad_()


def _in_thread(function: Any) -> threading.Thread:
    thread = threading.Thread(target=function)
    thread.start()
    return thread


def _step_in_another_context(server: Any, optimizer: DistributedOptimizer) -> None:
    def train(_: int) -> None:
        with dist_autograd.context() as context_id:
            dist_autograd.backward(context_id, [server.rpc_sync().forward(_input(7)).sum()])
            optimizer.step(context_id)

    in_threads(1, train)


def _between(consistency: str, method: str, times: int) -> None:
    """Step between the forward and the backward pass of another context."""
    server = rpc.remote("worker1", Server)
    optimizer = DistributedOptimizer(optim.Adam, server.rpc_sync().references(), lr=LR, consistency=consistency)
    local, x = Server(), _input()
    (local.forward(x) ** 2).sum().backward()
    expected, of_parameters = x.grad, [parameter.grad for parameter in local.parameters()]
    with dist_autograd.context() as context_id:
        x = _input()
        y = getattr(server.rpc_sync(), method)(x)
        before = server.rpc_sync().references()[0].to_here().detach().clone()
        for _ in range(times):
            _step_in_another_context(server, optimizer)
        assert not torch.equal(before, server.rpc_sync().references()[0].to_here())
        dist_autograd.backward(context_id, [(y**2).sum()])
        torch.testing.assert_close(dist_autograd.get_gradients(context_id)[x], expected)
        for found, wanted in zip(server.rpc_sync().gradients(context_id), of_parameters, strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("method", "times"), [("forward", 1), ("forward", 3), ("forward_later", 1)])
def test_versioned_passes_get_the_values_that_they_used(workers: Cluster, method: str, times: int) -> None:
    workers.run(0, _between, "versioned", method, times)


def _fails(consistency: str, method: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        _between(consistency, method, 1)


def test_without_it_the_pass_fails(workers: Cluster) -> None:
    workers.run(0, _fails, "none", "forward", BackwardError, "modified by an inplace operation")


def test_versioned_does_not_hold_for_functions_that_run_again(workers: Cluster) -> None:
    workers.run(0, _fails, "versioned", "checkpointed", BackwardError, "Use consistency='locked'")


def _is_waiting() -> bool:
    guard = current_agent().parameter_guard
    return guard.locked is not None and guard.locked.state.is_busy


def _users() -> int:
    guard = current_agent().parameter_guard
    return 0 if guard.locked is None else len(guard.locked.state.users)


def _until_a_step_waits() -> None:
    wait_until(_is_waiting, "a step waits")


def _locked() -> None:
    server = rpc.remote("worker1", Server)
    optimizer = DistributedOptimizer(optim.SGD, server.rpc_sync().references(), lr=LR, consistency="locked")
    before = server.rpc_sync().references()[0].to_here().detach().clone()
    with dist_autograd.context() as context_id:
        y = server.rpc_sync().checkpointed(_input())
        other = _in_thread(lambda: _step_in_another_context(server, optimizer))
        rpc.rpc_sync("worker1", _until_a_step_waits)
        # A function of a context that is known there does not wait, and nothing has changed.
        again = server.rpc_sync().checkpointed(_input())
        assert torch.equal(y, again)
        dist_autograd.backward(context_id, [(y + again).sum()])
        optimizer.step(context_id)  # lets the other go on, too
        other.join()
    assert not torch.equal(before, server.rpc_sync().references()[0].to_here())
    # A context that only ends lets it go on as well.
    with dist_autograd.context():
        server.rpc_sync().forward(_input())
        other = _in_thread(lambda: _step_in_another_context(server, optimizer))
        rpc.rpc_sync("worker1", _until_a_step_waits)
    other.join()
    assert rpc.rpc_sync("worker1", _users) == 0


def test_locked_steps_wait_for_passes(workers: Cluster) -> None:
    workers.run(0, _locked)


def _many() -> None:
    """Trainers on two workers that use two servers in both orders: nobody waits for ever, and no pass fails."""
    servers = [rpc.remote(f"worker{rank}", Server) for rank in (1, 2)]
    calls = [rpc.rpc_async(f"worker{rank}", _train_many, (servers, rank)) for rank in (1, 2)]
    _train_many(servers, 0)
    for call in calls:
        call.wait()


def _train_many(servers: list[Any], rank: int) -> None:
    references = [reference for server in servers for reference in server.rpc_sync().references()]

    def train(number: int) -> None:
        optimizer = DistributedOptimizer(optim.SGD, references, lr=1e-3, consistency="locked")
        order = servers if (number + rank) % 2 else servers[::-1]
        for step in range(3):
            with dist_autograd.context() as context_id:
                x = _input(step)
                for server in order:
                    x = server.rpc_sync().forward(x)
                dist_autograd.backward(context_id, [x.sum()])
                optimizer.step(context_id)

    in_threads(2, train)


def test_locked_steps_of_many_trainers_on_two_servers(workers: Cluster) -> None:
    workers.run(0, _many)


def _hang_in_a_context(server: Any) -> None:
    with dist_autograd.context():
        server.rpc_sync().forward(_input())
        os.kill(os.getpid(), signal.SIGKILL)


def _dying_trainer() -> None:
    server = rpc.remote("worker1", Server)
    optimizer = DistributedOptimizer(optim.SGD, server.rpc_sync().references(), lr=LR, consistency="locked")
    before = server.rpc_sync().references()[0].to_here().detach().clone()
    rpc.rpc_async("worker2", _hang_in_a_context, (server,))
    rpc.rpc_sync("worker1", wait_until, (_has_users, "the other trainer uses it"))
    _step_in_another_context(server, optimizer)
    assert not torch.equal(before, server.rpc_sync().references()[0].to_here())


def _has_users() -> bool:
    return _users() > 0


def test_a_locked_step_does_not_wait_for_a_dead_trainer() -> None:
    with cluster(3, check=False) as job:
        job.run(0, _dying_trainer)


def _too_long() -> None:
    server = rpc.remote("worker1", Server)
    optimizer = DistributedOptimizer(optim.SGD, server.rpc_sync().references(), lr=LR, consistency="locked")
    rpc.rpc_sync("worker1", rpc.api._set_rpc_timeout, (0.3,))
    try:
        with dist_autograd.context():
            server.rpc_sync().forward(_input())
            with pytest.raises(
                RpcTimeoutError, match=r"has waited 0\.3 s .* context \d+ of worker0\. It was not taken"
            ):
                _step_in_another_context(server, optimizer)
    finally:
        rpc.rpc_sync("worker1", rpc.api._set_rpc_timeout, (60.0,))
    _step_in_another_context(server, optimizer)
    with pytest.raises(UsageError, match="use 'none', 'versioned' or 'locked'"):
        DistributedOptimizer(optim.SGD, [], lr=LR, consistency="maybe")


def test_a_locked_step_that_waits_too_long_names_the_context(workers: Cluster) -> None:
    workers.run(0, _too_long)
