"""Two organisations train one model. Neither shows the other its data, its half of the model, or its code.

One has the inputs and the lower half, the other has the labels and the upper half. They exchange activations,
gradients, the loss and the accuracy. The job is restricted, so each can only call functions that the other exposes, and
nothing that arrives is unpickled. They call functions by names that they have agreed on. Here both halves are in one
file; in a real job each organisation has its own program on its own host, with the same FARPROP_SECRET.
"""

import tempfile

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import NotExposedError

EXAMPLES, STEPS = 256, 60


class Party:
    """One organisation's half of the model, with an optimizer of its own."""

    def __init__(self, half: nn.Module) -> None:
        self.half = half
        self.optimizer = torch.optim.Adam(half.parameters(), lr=0.02)

    def step(self, context_id: int) -> None:
        """Take an optimizer step with the gradients that a backward pass has left in the context."""
        gradients = dist_autograd.get_gradients(context_id)
        for parameter in self.half.parameters():
            parameter.grad = gradients[parameter]
        self.optimizer.step()


# The organisation with the labels, and the functions that it exposes.

labelled: Party
labels: Tensor


@rpc.expose(name="loss")
def loss_of(activations: Tensor) -> Tensor:
    return nn.functional.cross_entropy(labelled.half(activations), labels)


@rpc.expose(name="step")
def step(context_id: int) -> None:
    labelled.step(context_id)


@rpc.expose(name="accuracy")
@torch.no_grad()
def accuracy(activations: Tensor) -> float:
    return (labelled.half(activations).argmax(1) == labels).float().mean().item()


def serve() -> None:
    global labelled, labels
    labelled = Party(nn.Linear(16, 2))
    labels = (_inputs().pow(2).sum(1) > 2).long()


# The organisation with the inputs. It exposes nothing.


def train() -> None:
    inputs = _inputs()
    own = Party(nn.Sequential(nn.Linear(2, 16), nn.Tanh()))
    for number in range(1, STEPS + 1):
        with dist_autograd.context() as context_id:
            loss = rpc.rpc_sync("labels", "loss", args=(own.half(inputs),))
            dist_autograd.backward(context_id, [loss])
            rpc.rpc_sync("labels", "step", args=(context_id,))
            own.step(context_id)
        if number % 20 == 0:
            print(f"step {number}: loss {loss.item():.2f}")
    right = rpc.rpc_sync("labels", "accuracy", args=(own.half(inputs).detach(),))
    print(f"right: {right:.0%}", flush=True)
    assert right > 0.85
    try:
        rpc.rpc_sync("labels", "os:system", args=("echo I am in",))
    except NotExposedError as error:
        print("refused:", str(error).split(".")[0], flush=True)


def _inputs() -> Tensor:
    """The examples. In a real job the organisation with the labels does not have the inputs."""
    return torch.randn(EXAMPLES, 2, generator=torch.Generator().manual_seed(1))


def worker(rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    if rank:
        serve()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}")
    name = "labels" if rank else "inputs"
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options, restricted=True)
    if not rank:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(worker, args=(f"{directory}/meeting-point",), nprocs=2)
