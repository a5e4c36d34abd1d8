"""MAML on sinusoids: a model that learns a new task in a few steps, split across workers.

Each task is a sinusoid. The inner loop adapts a copy of the parameters to a few points of it; the outer loop changes
the parameters so that adapted copies are good. So the outer gradient goes through the gradients of the inner loop, on
every worker: ``grad(..., create_graph=True)`` records its passes, and ``backward`` goes through them.

The layers belong to the workers ``low`` and ``high``. Their parameters, copies and gradients never leave them.
"""

import argparse
import math
import tempfile

import torch
import torch.multiprocessing as mp
from torch import Tensor

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.rpc import RRef

NAMES = ["trainer", "low", "high"]
SIZES = {"low": [(1, 20), (20,), (20, 20), (20,)], "high": [(20, 20), (20,), (20, 1), (1,)]}
TASKS, POINTS, INNER_STEPS, INNER_RATE, OUTER_RATE = 2, 10, 2, 0.05, 0.02


# On the workers that have layers


def parameters_of(name: str) -> list[Tensor]:
    """The initial parameters of a worker, the same in every run."""
    source = torch.Generator().manual_seed(NAMES.index(name))
    sizes = SIZES[name]
    return [
        (torch.randn(size, generator=source, dtype=torch.float64) / math.sqrt(size[0])).requires_grad_()
        for size in sizes
    ]


def make_parameters(name: str) -> list[RRef]:
    return [RRef(parameter) for parameter in parameters_of(name)]


def layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.tanh(x @ w1 + b1) @ w2 + b2


def step(context_id: int) -> None:
    """One step of the outer loop, for the parameters of this worker."""
    with torch.no_grad():
        for parameter, gradient in dist_autograd.get_gradients(context_id).items():
            parameter -= OUTER_RATE * gradient


def run_layers(x: Tensor, parameters: list[RRef]) -> Tensor:
    return layers(x, *[parameter.local_value() for parameter in parameters])


def adapted(parameter: RRef, gradient: RRef) -> Tensor:
    """A copy of a parameter after one step of the inner loop. Its graph leads to the parameter and the gradient."""
    return parameter.local_value() - INNER_RATE * gradient.local_value()


# On the trainer


def sinusoid(source: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Points of a random sinusoid: some to adapt to, and some to see how good that was."""
    amplitude, phase = 0.5 + 2 * torch.rand(2, generator=source, dtype=torch.float64)
    x = 6 * torch.rand(2 * POINTS, 1, generator=source, dtype=torch.float64) - 3
    y = amplitude * torch.sin(x + phase)
    return x[:POINTS], y[:POINTS], x[POINTS:], y[POINTS:]


def loss_of(model: dict[str, list[RRef]], x: Tensor, y: Tensor) -> Tensor:
    for name in ("low", "high"):
        x = rpc.rpc_sync(name, run_layers, args=(torch.tanh(x) if name == "high" else x, model[name]))
    return torch.nn.functional.mse_loss(x, y)


def adapt(context_id: int, model: dict[str, list[RRef]], x: Tensor, y: Tensor) -> dict[str, list[RRef]]:
    """The inner loop: copies of the parameters that fit these points better."""
    for _ in range(INNER_STEPS):
        inputs = [parameter for parameters in model.values() for parameter in parameters]
        gradients = iter(dist_autograd.grad(context_id, loss_of(model, x, y), inputs, create_graph=True))
        model = {
            name: [rpc.remote(name, adapted, args=(parameter, next(gradients))) for parameter in parameters]
            for name, parameters in model.items()
        }
    return model


def train(steps: int) -> list[float]:
    """The outer loop; returns its losses."""
    model = {name: rpc.rpc_sync(name, make_parameters, args=(name,)) for name in ("low", "high")}
    source = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        with dist_autograd.context() as context_id:
            loss = torch.zeros((), dtype=torch.float64)
            for _ in range(TASKS):
                x, y, new_x, new_y = sinusoid(source)
                loss = loss + loss_of(adapt(context_id, model, x, y), new_x, new_y) / TASKS
            dist_autograd.backward(context_id, [loss])
            for name in model:
                rpc.rpc_sync(name, step, args=(context_id,))
        losses.append(loss.item())
    return losses


def worker(rank: int, meeting_point: str, steps: int) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}")
    rpc.init_rpc(NAMES[rank], rank=rank, world_size=len(NAMES), rpc_backend_options=options)
    if NAMES[rank] == "trainer":
        for step, loss in enumerate(train(steps)):
            print(f"step {step:3}: loss {loss:.9f} after {INNER_STEPS} steps on a new sinusoid", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="MAML on sinusoids, split across three workers.")
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(worker, args=(f"{directory}/meeting-point", arguments.steps), nprocs=len(NAMES))
