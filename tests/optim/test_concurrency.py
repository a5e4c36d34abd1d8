"""Several contexts at once, from threads and from workers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, optim

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.optim import DistributedOptimizer
from tests.optim.models import Far, LinearPart, Nested, assert_same, in_threads
from tests.support.workers import Cluster

THREADS = 6
STEPS = 10
RATE = 0.125  # a power of two, as are the gradients: sums are exact in any order


def _step(part: Any, optimizer: DistributedOptimizer, x: Tensor) -> None:
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [part.rpc_sync().forward(x).sum()])
        optimizer.step(context_id)


def trainer(parts: list[Any], references: list[Any]) -> None:
    """Threads with their own optimizers, and threads that share one, for the same parameters."""
    shared = DistributedOptimizer(optim.SGD, references, lr=RATE)

    def train(number: int) -> None:
        optimizer = DistributedOptimizer(optim.SGD, references, lr=RATE) if number % 2 else shared
        for _ in range(STEPS):
            _step(parts[number % 3], optimizer, torch.full((1, 3), float(1 << number), dtype=torch.float64))

    in_threads(THREADS, train)


def _concurrent() -> None:
    far = Far(kind=LinearPart)
    before = far.values()
    others = [rpc.rpc_async(f"worker{rank}", trainer, (far.parts, far.references)) for rank in (1, 2)]
    trainer(far.parts, far.references)
    for other in others:
        other.wait()
    total = [sum(1 << number for number in range(THREADS) if number % 3 == part) * STEPS * 3 for part in range(3)]
    biases = [value - RATE * gradient for value, gradient in zip(before[3:], total, strict=True)]
    for value, expected in zip(far.values()[3:], biases, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert_same(far.values()[:3], before[:3])  # these have no gradients in any of the contexts


def test_threads_and_workers_at_once(workers: Cluster) -> None:
    workers.run(0, _concurrent)


class Alone(optim.SGD):
    """Detects whether two steps overlap on its worker."""

    inside = 0
    steps = 0

    def step(self, closure: Any = None) -> Any:
        Alone.inside += 1
        assert Alone.inside == 1
        result = super().step(closure)
        # A call lets other threads run.
        rpc.rpc_sync(rpc.get_worker_info().name, torch.neg, (torch.ones(1),))
        assert Alone.inside == 1
        Alone.steps += 1
        Alone.inside -= 1
        return result


def steps_taken() -> int:
    return Alone.steps


def _one_at_a_time() -> None:
    far = Far(kind=LinearPart)
    start = rpc.rpc_sync("worker1", steps_taken)
    optimizers = [DistributedOptimizer(Alone, far.references, lr=RATE) for _ in range(2)]
    x = torch.ones(1, 3, dtype=torch.float64)

    def train(number: int) -> None:
        for _ in range(STEPS):
            _step(far.parts[0], optimizers[number % 2], x)

    in_threads(THREADS, train)
    assert rpc.rpc_sync("worker1", steps_taken) - start == THREADS * STEPS


def test_steps_on_a_worker_do_not_overlap(workers: Cluster) -> None:
    workers.run(0, _one_at_a_time)


def _more_than_the_pool() -> None:
    far = Far(kind=LinearPart)
    optimizer = DistributedOptimizer(Nested, far.references, lr=RATE)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [far.loss(torch.ones(1, 3, dtype=torch.float64))])
        # Waiting steps must leave a thread for the calls of the running step.
        in_threads(40, lambda _: optimizer.step(context_id))


def test_more_steps_at_once_than_the_pool_has_threads(workers: Cluster) -> None:
    workers.run(0, _more_than_the_pool)


class Filling(optim.Optimizer):
    """Has a state that shows whether it was read during a step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            for name in ("first", "second"):
                state.setdefault(name, torch.zeros(500_000)).add_(1)


def _state_meanwhile() -> None:
    far = Far(kind=LinearPart)
    optimizer = DistributedOptimizer(Filling, far.references)
    with dist_autograd.context() as context_id:
        optimizer.step(context_id)

        def work(number: int) -> None:
            for _ in range(10):
                if number:
                    optimizer.step(context_id)
                    continue
                for part in optimizer.state_dict()["workers"]:
                    for state in part["optimizer"]["state"].values():
                        assert len({bound.item() for key in state for bound in state[key].aminmax()}) == 1

        in_threads(3, work)


def test_a_state_is_read_between_two_steps(workers: Cluster) -> None:
    workers.run(0, _state_meanwhile)
