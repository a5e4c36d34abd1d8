"""A server holds the parameters of a model; trainers send it gradients of their share of the data.

The server starts the trainers with ``train``, and they call it back with ``push``. That is decorated with
``async_execution``: it returns a future at once, and the trainers get their answers, the updated parameters, when all
of them have pushed. However many wait, they use up no thread of the server.
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
TRUTH = torch.tensor([3.0, -2.0, 0.5])  # what the trainers shall find


class Server:
    """The parameters, and the gradients that have come for the next update."""

    def __init__(self) -> None:
        self.parameters = torch.zeros_like(TRUTH)
        self.gradients: list[Tensor] = []
        self.updated: Future[Tensor] = Future()
        self.lock = threading.Lock()


server = Server()  # every process has one; the one of the worker "server" counts


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
    """What the server asks each trainer to do; returns the last loss."""
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
    rpc.shutdown()  # here the trainers wait, and are called, until the server comes here, too


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(worker, args=(f"{directory}/meeting-point",), nprocs=1 + TRAINERS)
