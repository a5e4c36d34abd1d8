"""``farprop demo``: four workers train one model that is split across them, on scikit-learn's pictures of digits.

Each worker has a stage of the network. A stage calls the next one, so what it has computed goes from worker to worker,
and not through ``worker0``. A batch is split into parts, which follow each other through the stages: while one stage
works on a part, the stage before it works on the next.

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

import farprop
import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop import dashboard
from farprop.errors import UsageError
from farprop.nn import RemoteModule
from farprop.optim import DistributedOptimizer

WORLD_SIZE = 4
STEPS, BATCH, PARTS = 150, 256, 4
PROFILED_STEPS = 5
PIXELS, WIDTH, DIGITS = 64, 48, 10
TESTED = 360  # of 1,797 pictures
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
    sizes = [PIXELS, *[WIDTH] * (WORLD_SIZE - 1), DIGITS]
    stages: list[RemoteModule] = []
    for rank in reversed(range(WORLD_SIZE)):
        following = stages[0] if stages else None
        stages.insert(0, RemoteModule(f"worker{rank}", Stage, (sizes[rank], sizes[rank + 1], following)))
    return stages


def load() -> tuple[Tensor, Tensor]:
    """Pictures of 8×8 pixels in random order, and the digit that each shows."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("The demo takes its data from scikit-learn: pip install 'farprop[demo]'") from error
    found = load_digits()
    order = torch.randperm(len(found.target))
    return torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]


def train(
    model: RemoteModule, optimizer: DistributedOptimizer, pictures: Tensor, digits: Tensor, steps: int
) -> Iterator[tuple[float, float]]:
    """Train; yield for each step the loss and the share of the batch that is classified correctly."""
    for _ in range(steps):
        batch = torch.randint(len(pictures), (BATCH,))
        with dist_autograd.context() as context:
            under_way = [model.forward_async(part) for part in pictures[batch].chunk(PARTS)]
            scores = torch.cat([future.wait() for future in under_way])
            loss = nn.functional.cross_entropy(scores, digits[batch])
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        yield loss.item(), (scores.argmax(1) == digits[batch]).float().mean().item()


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


def serve_page() -> None:
    """Serve the live page of the job until it ends, if what it needs is installed."""
    try:
        page = dashboard.start()
    except UsageError as error:
        print(f"Without the live page: {error}", flush=True)
    else:
        print(f"Look at {page.url} while it runs.", flush=True)


def run() -> int:
    """Run worker0's part; return the exit code."""
    pictures, digits = load()
    serve_page()
    stages = build()
    weights: list[Any] = [weight for stage in stages for weight in stage.remote_parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.1, momentum=0.9)
    training = stages[0], optimizer, pictures[TESTED:], digits[TESTED:]
    began = time.perf_counter()
    for number, (loss, right) in enumerate(train(*training, STEPS), 1):
        show(number, loss, right, CALLS_A_STEP * number / (time.perf_counter() - began))
    seconds = time.perf_counter() - began
    print(f"{CALLS_A_STEP * STEPS} calls and {STEPS} backward passes through four workers in {seconds:.1f} s.")
    with farprop.profile() as profile:
        for _ in train(*training, PROFILED_STEPS):
            pass
    print(f"Where the time of {PROFILED_STEPS} more steps went:\n{profile.summary()}")
    right = (stages[0](pictures[:TESTED]).argmax(1) == digits[:TESTED]).float().mean().item()
    print(f"{right:.1%} of {TESTED} pictures that it has not seen are classified correctly.")
    return 0 if right > 0.8 else 1


# Starting and stopping


def main() -> int:
    """Run the demo.

    Returns:
        The exit code: 0, 1 if the model has not learned, 130 after Ctrl-C.
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
