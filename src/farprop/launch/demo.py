"""``farprop demo``: four workers train one model that is split across them.

Each worker has a stage of a network that finds the arm of a spiral for a point. A stage calls the next one, so what it
has computed goes from worker to worker, and not through ``worker0``. The data is split into parts, which follow each
other through the stages: while one stage works on a part, the stage before it works on the next.

``worker0`` also has the data and the loss. One call of ``backward`` runs through all four workers, and one ``step`` of
the optimizer changes the weights where they are.
"""

from __future__ import annotations

import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.nn import RemoteModule
from farprop.optim import DistributedOptimizer

WORLD_SIZE = 4
STEPS, PARTS = 150, 4
ARMS, POINTS_PER_ARM = 3, 80
WIDTH = 32
CALLS_A_STEP = PARTS * WORLD_SIZE + WORLD_SIZE  # each part at each stage, and the step of each optimizer


# On every worker


class Stage(nn.Module):
    """Some layers of the model, and the stage after them, on another worker."""

    def __init__(self, inputs: int, outputs: int, following: RemoteModule | None) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(inputs, outputs)]
        if following is not None:
            layers.append(nn.Tanh())
        self.layers = nn.Sequential(*layers)
        self._following = [following]  # in a list, because it is no part of this module: it has its own worker

    def forward(self, given: Tensor) -> Tensor:
        found: Tensor = self.layers(given)
        (following,) = self._following
        return found if following is None else following(found)


def join(rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    # The others call shutdown at once, and would say after five seconds that they wait for worker0: in the drawing.
    logging.getLogger("farprop").setLevel(logging.ERROR)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)


def serve(rank: int, meeting_point: str) -> None:
    join(rank, meeting_point)
    rpc.shutdown()  # waits until worker0 calls it, too


# On worker0: the data, the loss and the training loop


def build() -> list[RemoteModule]:
    """Make the stages, the last one first: each is told which one follows it."""
    sizes = [2, *[WIDTH] * (WORLD_SIZE - 1), ARMS]
    stages: list[RemoteModule] = []
    for rank in reversed(range(WORLD_SIZE)):
        following = stages[0] if stages else None
        stages.insert(0, RemoteModule(f"worker{rank}", Stage, (sizes[rank], sizes[rank + 1], following)))
    return stages


def train(model: RemoteModule, optimizer: DistributedOptimizer) -> Iterator[tuple[float, float]]:
    """Train; yield for each step the loss and the share of points that are classified correctly."""
    points, arms = spiral()
    for _ in range(STEPS):
        with dist_autograd.context() as context:
            under_way = [model.forward_async(part) for part in points.chunk(PARTS)]
            scores = torch.cat([future.wait() for future in under_way])
            loss = nn.functional.cross_entropy(scores, arms)
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        yield loss.item(), (scores.argmax(1) == arms).float().mean().item()


def spiral() -> tuple[Tensor, Tensor]:
    """Noisy points on the arms of a spiral, in random order; and the arm of each."""
    arms = torch.arange(ARMS).repeat(POINTS_PER_ARM)[torch.randperm(ARMS * POINTS_PER_ARM)]
    radius = torch.rand(len(arms))
    angle = 5 * radius + arms * (2 * torch.pi / ARMS) + 0.1 * torch.randn(len(arms))
    return torch.stack([radius * angle.sin(), radius * angle.cos()], 1), arms


def show(number: int, loss: float, right: float, rate: float) -> None:
    """Show progress: a bar on a terminal, ten lines elsewhere."""
    text = f"step {number:3}/{STEPS}  loss {loss:.4f}  right {right:6.1%}  {rate:5.0f} calls/s"
    if sys.stdout.isatty():
        width = max(0, min(40, shutil.get_terminal_size().columns - len(text) - 5))
        done = width * number // STEPS
        end = "\n" if number == STEPS else ""
        print(f"\r[{'#' * done}{'.' * (width - done)}]  {text}\x1b[K", end=end, flush=True)
    elif number % (STEPS // 10) == 0:
        print(text, flush=True)


def run() -> int:
    """Run worker0's part; return the exit code."""
    stages = build()
    weights: list[Any] = [weight for stage in stages for weight in stage.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.2, momentum=0.9)
    losses: list[float] = []
    began = time.perf_counter()
    for loss, right in train(stages[0], optimizer):
        losses.append(loss)
        show(len(losses), loss, right, CALLS_A_STEP * len(losses) / (time.perf_counter() - began))
    seconds = time.perf_counter() - began
    calls = CALLS_A_STEP * STEPS
    print(f"{calls} calls and {STEPS} backward passes through four workers in {seconds:.1f} s.")
    fell = losses[-1] < losses[0] / 4
    print(f"The loss {'fell' if fell else 'DID NOT FALL'} from {losses[0]:.4f} to {losses[-1]:.4f}.")
    return 0 if fell else 1


# Starting and stopping


def main() -> int:
    """Run the demo.

    Returns:
        The exit code: 0, 1 if the loss has not fallen, 130 after Ctrl-C.
    """
    print("Starting four workers. Each has a stage of one model; worker0 has the data, too.", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        at = f"{directory}/meeting-point"
        # Torch takes seconds to import: one process does it, and the workers are forked from that one.
        starts = mp.get_context("forkserver")
        starts.set_forkserver_preload([__name__])
        others = [starts.Process(target=serve, args=(rank, at)) for rank in range(1, WORLD_SIZE)]
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the others: main ends them on Ctrl-C
        for process in others:
            process.start()
        signal.signal(signal.SIGINT, on_interrupt)
        try:
            join(0, at)
            code = run()
            rpc.shutdown()
            for process in others:
                process.join()
            return code
        except KeyboardInterrupt:
            print("\nStopped.")
            return 130
        finally:
            for process in others:
                process.terminate()
                process.join()
