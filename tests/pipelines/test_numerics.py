"""Losses, gradients and outputs of pipelines are those of one process."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import farprop
import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.nn import RemoteModule
from farprop.optim import DistributedOptimizer, GradScaler, clip_grad_norm_
from farprop.rpc import RRef
from tests.pipelines.models import WIDTH, alone, batch, gradients, layers
from tests.support.workers import Cluster, cluster

PLACES = [
    ["worker1"],
    ["worker1", "worker2"],
    ["worker0", "worker1", "worker2", "worker3"],
    ["worker1", "worker1", "worker2"],
    ["worker1", "worker0", "worker1", "worker0", "worker1"],
    ["worker0", "worker0"],
]


def assert_close(found: Any, right: Any) -> None:
    torch.testing.assert_close(found, right, rtol=0, atol=1e-9)


def by_worker(names: list[str], modules: list[nn.Module]) -> list[torch.Tensor | None]:
    """The gradients in the order of ``pipe.parameters()``."""
    return [
        p.grad
        for name in dict.fromkeys(names)
        for n, m in zip(names, modules, strict=True)
        if n == name
        for p in m.parameters()
    ]


def step(names: list[str], schedule: str, samples: int, micro_batches: int, reduction: str) -> None:
    x, y = batch(samples)
    modules = layers(len(names))
    pipe = farprop.pipeline(list(zip(names, modules, strict=True)), micro_batches=micro_batches, schedule=schedule)
    assert pipe.workers == tuple(names)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mse_loss(output, target, reduction="mean") if reduction == "mean" else (output - target).square().sum()

    right = alone(modules, x, y, loss_fn)
    parameters = pipe.parameters()
    with dist_autograd.context() as context_id:
        loss = pipe.step(x, y, loss_fn=loss_fn, reduction=reduction)
        assert not loss.requires_grad
        assert_close(loss, right)
        assert_close(gradients(context_id, parameters), by_worker(names, modules))
        # A second step adds to the gradients of the context.
        pipe.step(x, y, loss_fn=loss_fn, reduction=reduction)
        assert_close(gradients(context_id, parameters), [2 * g for g in by_worker(names, modules)])
    assert_close(pipe(x), nn.Sequential(*modules)(x).detach())


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("names", PLACES, ids="-".join)
def test_gradients_are_those_of_one_process(workers: Cluster, names: list[str], schedule: str) -> None:
    workers.run(0, step, names, schedule, 12, 4, "mean")


# A batch that can't be divided evenly, one sample for each, fewer samples than micro-batches, and a single one.
@pytest.mark.parametrize("samples", [11, 8, 3, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batches_of_any_size(workers: Cluster, samples: int, reduction: str) -> None:
    workers.run(0, step, ["worker1", "worker2", "worker3"], "1f1b", samples, 8, reduction)


def train() -> None:
    x, y = batch(12)
    modules = layers(3)
    names = ["worker1", "worker2", "worker3"]
    pipe = farprop.pipeline(list(zip(names, modules, strict=True)), micro_batches=4)
    near = torch.optim.Adam(nn.Sequential(*modules).parameters(), lr=0.05)
    far = DistributedOptimizer(torch.optim.Adam, pipe.parameters(), lr=0.05)
    for _ in range(4):
        near.zero_grad()
        right = alone(modules, x, y, mse_loss)
        norm = torch.nn.utils.clip_grad_norm_(nn.Sequential(*modules).parameters(), 0.1)
        near.step()
        with dist_autograd.context() as context_id:
            loss = pipe.step(x, y, loss_fn=mse_loss)
            assert_close(clip_grad_norm_(context_id, pipe.parameters(), 0.1), norm)
            far.step(context_id)
        assert_close(loss, right)
    assert_close(pipe(x), nn.Sequential(*modules)(x).detach())


def test_training_with_an_optimizer_and_clipping(workers: Cluster) -> None:
    workers.run(0, train)


def train_scaled() -> None:
    x, y = batch(6)
    modules = layers(2)
    right = alone(modules, x, y, mse_loss)
    pipe = farprop.pipeline(list(zip(["worker1", "worker2"], modules, strict=True)), micro_batches=3)
    parameters = pipe.parameters()
    optimizer = DistributedOptimizer(torch.optim.SGD, parameters, lr=0.1)
    scaler = GradScaler(init_scale=8.0)
    with dist_autograd.context() as context_id:
        scale = scaler.scale(torch.ones(()))
        assert_close(pipe.step(x, y, loss_fn=lambda output, target: mse_loss(output, target) * scale), 8 * right)
        scaler.step(optimizer, context_id)
        scaler.update()
    stepped = [parameter - 0.1 * parameter.grad for module in modules for parameter in module.parameters()]
    assert_close([parameter.to_here().detach() for parameter in parameters], [value.detach() for value in stepped])


def test_scaled_losses(workers: Cluster) -> None:
    workers.run(0, train_scaled)


class Fork(nn.Module):
    """Two results, one of which the next stage does not differentiate, and an argument that it returns as it is."""

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x, torch.tanh(x), places


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight + y[:, places[0]], x


class Pick(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), places


def several_tensors() -> None:
    torch.manual_seed(1)
    modules = [Pick(), Fork(), Join()]
    x, y = batch(6)
    places = torch.randperm(WIDTH).expand(6, WIDTH)

    def loss_fn(output: tuple[torch.Tensor, torch.Tensor], targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return mse_loss(output[0], targets[0]) + mse_loss(output[1], targets[1])

    values: Any = (x, places)
    for module in modules:
        values = module(*values)
    right = loss_fn(values, (y, 2 * y))
    right.backward()
    names = ["worker1", "worker2", "worker3"]
    pipe = farprop.pipeline(list(zip(names, modules, strict=True)), micro_batches=3)
    with dist_autograd.context() as context_id:
        assert_close(pipe.step([x, places], (y, 2 * y), loss_fn=loss_fn), right.detach())
        assert_close(gradients(context_id, pipe.parameters()), by_worker(names, modules))
    assert_close(pipe((x, places)), tuple(value.detach() for value in values))


def test_stages_with_several_tensors(workers: Cluster) -> None:
    workers.run(0, several_tensors)


def frozen_and_identity() -> None:
    """Stages without parameters that require grad: at the beginning, in the middle, and one that returns its input."""
    x, y = batch(6)
    modules = [layers(1)[0].requires_grad_(False), nn.Identity(), *layers(2), nn.Identity()]
    names = ["worker1", "worker2", "worker3", "worker1", "worker2"]
    right = alone(modules, x, y, mse_loss)
    pipe = farprop.pipeline(list(zip(names, modules, strict=True)), micro_batches=3)
    with dist_autograd.context() as context_id:
        assert_close(pipe.step(x, y, loss_fn=mse_loss), right)
        assert_close(gradients(context_id, pipe.parameters()), by_worker(names, modules))


def test_frozen_stages_and_stages_that_return_their_input(workers: Cluster) -> None:
    workers.run(0, frozen_and_identity)


def make_stage(number: int) -> nn.Module:
    return layers(2)[number]


def make_first() -> nn.Module:
    return make_stage(0)


def all_kinds_of_stages() -> None:
    x, y = batch(6)
    modules = layers(2)
    right = alone(modules, x, y, mse_loss)
    kinds = [  # made one after the other: they set the seed of their worker
        lambda: ("worker1", make_first),
        lambda: ("worker1", lambda: make_stage(0)),
        lambda: RemoteModule("worker1", make_stage, args=(0,)),
        lambda: rpc.remote("worker1", make_stage, args=(0,)),
    ]
    for make in kinds:
        stage = make()
        for second in (RRef(modules[1]), rpc.remote("worker2", make_stage, (1,))):
            pipe = farprop.pipeline([stage, second], micro_batches=2)
            with dist_autograd.context() as context_id:
                assert_close(pipe.step(x, y, loss_fn=mse_loss), right)
                found = gradients(context_id, pipe.parameters())
            assert_close(found, [p.grad for module in modules for p in module.parameters()])


def test_stages_by_functions_remote_modules_and_references(workers: Cluster) -> None:
    workers.run(0, all_kinds_of_stages)


class Caller(nn.Module):
    """A stage that calls a module on another worker itself."""

    def __init__(self, helper: RemoteModule) -> None:
        super().__init__()
        self.own = layers(1)[0]
        self.helpers = (helper,)  # not a submodule: modules ask theirs for parameters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helpers[0](self.own(x))


def make_caller() -> nn.Module:
    return Caller(RemoteModule("worker3", make_stage, args=(1,)))


def of_helper(rref: RRef[Caller]) -> list[RRef[Any]]:
    return rref.local_value().helpers[0].remote_parameters()


def nested_calls() -> None:
    x, y = batch(8)
    modules = [*layers(2), layers(1)[0]]
    right = alone(modules, x, y, mse_loss)
    caller = rpc.remote("worker1", make_caller)
    helper = rpc.rpc_sync("worker1", of_helper, (caller,))
    pipe = farprop.pipeline([caller, ("worker2", layers(1)[0])], micro_batches=4)
    with dist_autograd.context() as context_id:
        assert_close(pipe.step(x, y, loss_fn=mse_loss), right)
        assert_close(gradients(context_id, helper), [p.grad for p in modules[1].parameters()])


def test_a_stage_may_call_other_workers(workers: Cluster) -> None:
    workers.run(0, nested_calls)


def modes_of_modules() -> None:
    """Dropout draws for each micro-batch; statistics of BatchNorm are those of micro-batches, one after the other."""
    x, y = batch(8)
    norm = nn.BatchNorm1d(WIDTH).double()
    pipe = farprop.pipeline([("worker1", norm), ("worker2", nn.Dropout(0.5))], micro_batches=2)
    for part in x.chunk(2):
        norm(part)
    with dist_autograd.context():
        pipe.step(x, y, loss_fn=mse_loss)
    assert pipe.eval() is pipe
    assert_close(pipe(x), norm.eval()(x).detach())
    assert_close(pipe(x), pipe(x))
    assert not pipe.train()(x).equal(pipe(x))


def test_batch_norm_dropout_and_modes(workers: Cluster) -> None:
    workers.run(0, modes_of_modules)


class Dtypes(nn.Module):
    """Fails if autocast is not what the caller has, in the forward and in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.is_autocast_enabled("cpu")
        y = self.linear(x)
        assert y.dtype is torch.bfloat16
        y.register_hook(_check_no_autocast)
        return y


def _check_no_autocast(gradient: torch.Tensor) -> None:
    assert not torch.is_autocast_enabled("cpu")


def under_autocast() -> None:
    x, y = torch.randn(2, 6, WIDTH)
    pipe = farprop.pipeline([("worker1", Dtypes()), ("worker2", Dtypes())], micro_batches=3)
    with dist_autograd.context() as context_id, torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, y, loss_fn=mse_loss)
        assert [g.dtype for g in gradients(context_id, pipe.parameters()) if g is not None] == [torch.float32] * 4


def test_autocast_of_the_caller_holds_in_forwards_alone(workers: Cluster) -> None:
    workers.run(0, under_autocast)


def two_pipelines() -> None:
    x, y = batch(12)
    modules = layers(3)
    right = alone(modules, x, y, mse_loss)
    errors: list[BaseException] = []

    def train_one(names: list[str]) -> None:
        try:
            pipe = farprop.pipeline(list(zip(names, modules, strict=True)), micro_batches=6)
            for _ in range(5):
                with dist_autograd.context():
                    assert_close(pipe.step(x, y, loss_fn=mse_loss), right)
        except BaseException as error:
            errors.append(error)

    orders = [["worker1", "worker2", "worker3"], ["worker3", "worker2", "worker1"], ["worker2", "worker0", "worker2"]]
    threads = [threading.Thread(target=train_one, args=(names,)) for names in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_pipelines_through_the_same_workers_at_the_same_time(workers: Cluster) -> None:
    workers.run(0, two_pipelines)


def nested_step() -> None:
    """A called function may run a step, also through its own worker."""
    assert rpc.rpc_sync("worker1", _loss_of_step) > 0


def _loss_of_step() -> float:
    x, y = batch(4)
    names = ["worker1", "worker0", "worker1"]
    pipe = farprop.pipeline(list(zip(names, layers(3), strict=True)), micro_batches=4)
    with dist_autograd.context():
        return pipe.step(x, y, loss_fn=mse_loss).item()


def test_one_thread_on_each_worker_is_enough() -> None:
    with cluster(3, options={"num_worker_threads": 1}) as job:
        for names in (["worker0", "worker1", "worker2"], ["worker1", "worker2"] * 4, ["worker0"] * 3):
            for schedule in ("1f1b", "gpipe"):
                job.run(0, step, names, schedule, 12, 12, "mean")
        job.run(0, nested_step)


def test_over_tcp_with_large_activations() -> None:
    with cluster(3, env={"FARPROP_TRANSPORT": "tcp"}) as job:
        job.run(0, large)


def large() -> None:
    torch.manual_seed(0)
    modules = [nn.Linear(512, 512) for _ in range(3)]
    x, y = torch.randn(2, 512, 512)
    right = alone(modules, x, y, mse_loss)
    pipe = farprop.pipeline(list(zip(["worker1", "worker2", "worker0"], modules, strict=True)), micro_batches=4)
    with dist_autograd.context() as context_id:
        torch.testing.assert_close(pipe.step(x, y, loss_fn=mse_loss), right, rtol=0, atol=1e-6)
        found = gradients(context_id, pipe.parameters())
    torch.testing.assert_close(found, [p.grad for m in modules for p in m.parameters()], rtol=0, atol=1e-6)
