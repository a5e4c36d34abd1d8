"""A server holds the parameters of a model; trainers send it the gradients of their share of the data.

The server calls ``train`` on each trainer, and the trainers call ``push`` on the server. ``push`` is decorated with
``async_execution``: it returns a future at once. The trainers get their answers, the updated parameters, when all of
them have pushed. Trainers that wait occupy no thread of the server.
"""

import tempfile
import threading

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.futures import Future

import farprop.rpc as rpc

TRAINERS = 3
STEPS, RATE = 100, 0.2
TRUTH = torch.tensor([3.0, -2.0, 0.5])  # the parameters that the training should find


class Server:
    """The parameters, and the gradients that have arrived for the next update."""

    def __init__(self) -> None:
        self.parameters = torch.zeros_like(TRUTH)
        self.gradients: list[Tensor] = []
        self.updated: Future[Tensor] = Future()
        self.lock = threading.Lock()


server = Server()  # every process has one; only that of the worker "server" is used


@rpc.functions.async_execution
def push(gradient: Tensor) -> Future[Tensor]:
    with server.lock:
        updated = server.updated
        server.gradients.append(gradient)
        if len(server.gradients) == TRAINERS:
            server.parameters -= RATE * torch.stack(server.gradients).mean(0)
            server.gradients, server.updated = [], Future()
            updated.set_result(server.parameters.clone())
    return updated


def train(number: int) -> float:
    """Train on one trainer's data, and return the last loss. The server calls it on each trainer."""
    torch.manual_seed(number)
    inputs = torch.randn(100, len(TRUTH))
    targets = inputs @ TRUTH + 0.01 * torch.randn(100)
    parameters = torch.zeros_like(TRUTH)
    for _ in range(STEPS):
        parameters.requires_grad_()
        loss = torch.nn.functional.mse_loss(inputs @ parameters, targets)
        (gradient,) = torch.autograd.grad(loss, parameters)
        parameters = rpc.rpc_sync("server", push, args=(gradient,))
    return loss.item()


def worker(rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}")
    name = f"trainer{rank}" if rank else "server"
    rpc.init_rpc(name, rank=rank, world_size=1 + TRAINERS, rpc_backend_options=options)
    if rank == 0:
        numbers = range(1, 1 + TRAINERS)
        losses = torch.futures.wait_all([rpc.rpc_async(f"trainer{n}", train, args=(n,)) for n in numbers])
        for number, loss in zip(numbers, losses, strict=True):
            print(f"trainer{number}: loss {loss:.6f} after {STEPS} steps")
        print("server: found", [round(x, 2) for x in server.parameters.tolist()], "for", TRUTH.tolist(), flush=True)
        assert torch.allclose(server.parameters, TRUTH, atol=0.05)
    rpc.shutdown()  # the trainers wait here, and answer calls, until the server calls it, too


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(worker, args=(f"{directory}/meeting-point",), nprocs=1 + TRAINERS)
