"""Four workers train one model that is split across them. Run it with ``make demo``.

``worker1``, ``worker2`` and ``worker3`` each hold one stage of a network that finds the arm of a spiral for a point.
``worker0`` has the data and the loss, and calls the stages:

- forward: each stage gets the output of the stage before it, and keeps what it needs for the backward pass;
- backward: each stage gets the gradient of its output, and returns the gradient of its input;
- step: all stages update their weights at the same time.

The data is split into parts, so that the stages work in parallel, each on another part.

The program uses plain calls only, to show what they can do. With references (``rpc.remote``), activations would go from
stage to stage without passing through ``worker0``. With ``farprop.autograd``, the backward pass would be one call.
"""

import logging
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import farprop.rpc as rpc

STAGES = ["worker1", "worker2", "worker3"]
WORLD_SIZE = 1 + len(STAGES)
STEPS, PARTS = 150, 3
ARMS, POINTS_PER_ARM = 3, 80


# On worker1, worker2 and worker3: the functions that worker0 calls, and their state.


class Stage:
    """Some layers of the model, the momentum of their weights, and each part's input and output, kept for backward."""

    def __init__(self, layers: nn.Module) -> None:
        self.layers = layers
        self.momentum = [torch.zeros_like(weight) for weight in layers.parameters()]
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}


stage: Stage


def build(layers: nn.Module) -> None:
    global stage
    stage = Stage(layers)


def forward(part: int, given: Tensor) -> Tensor:
    given.requires_grad_()
    output = stage.layers(given)
    stage.kept[part] = given, output
    return output.detach()  # the graph stays here


def backward(part: int, gradient: Tensor) -> Tensor | None:
    given, output = stage.kept.pop(part)
    output.backward(gradient)  # the gradients of the weights stay here
    return given.grad


@torch.no_grad()
def step() -> None:
    # Without torch.optim: importing it takes as long as the whole training.
    for weight, momentum in zip(stage.layers.parameters(), stage.momentum, strict=True):
        momentum.mul_(0.9).add_(weight.grad)
        weight -= 0.2 * momentum
        weight.grad = None


def serve(rank: int, meeting_point: str) -> None:
    join(rank, meeting_point)
    rpc.shutdown()  # waits until worker0 calls it, too


# On worker0: the data, the loss, and the training loop.

calls = 0


def call(to: str, function: Callable[..., Any], *args: Any) -> torch.futures.Future[Any]:
    global calls
    calls += 1
    return rpc.rpc_async(to, function, args=args)


def through(stages: Sequence[str], function: Callable[..., Any], parts: Sequence[Tensor]) -> list[Tensor]:
    """Send every part through every stage. While one stage works on a part, the stage before it works on the next."""
    values = list(parts)
    for tick in range(len(values) + len(stages) - 1):
        at_work = [part for part in range(len(values)) if 0 <= tick - part < len(stages)]
        futures = [call(stages[tick - part], function, part, values[part]) for part in at_work]
        for part, future in zip(at_work, futures, strict=True):
            values[part] = future.wait()
    return values


def train() -> Iterator[tuple[float, float]]:
    """Train; yield for each step the loss and the share of points that are classified correctly."""
    torch.manual_seed(0)
    points, arms = spiral()
    first = nn.Sequential(nn.Linear(2, 32), nn.Tanh())
    second = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    third = nn.Linear(32, ARMS)
    for name, layers in zip(STAGES, (first, second, third), strict=True):
        call(name, build, layers).wait()
    for _ in range(STEPS):
        outputs = [output.requires_grad_() for output in through(STAGES, forward, points.chunk(PARTS))]
        scores = torch.cat(outputs)
        loss = nn.functional.cross_entropy(scores, arms)
        through(STAGES[::-1], backward, torch.autograd.grad(loss, outputs))
        torch.futures.wait_all([call(name, step) for name in STAGES])
        yield loss.item(), (scores.argmax(1) == arms).float().mean().item()


def spiral() -> tuple[Tensor, Tensor]:
    """Noisy points on the arms of a spiral, in random order; and the arm of each."""
    arms = torch.arange(ARMS).repeat(POINTS_PER_ARM)[torch.randperm(ARMS * POINTS_PER_ARM)]
    radius = torch.rand(len(arms))
    angle = 5 * radius + arms * (2 * torch.pi / ARMS) + 0.1 * torch.randn(len(arms))
    return torch.stack([radius * angle.sin(), radius * angle.cos()], 1), arms


def show(number: int, loss: float, right: float) -> None:
    """Show progress: a bar on a terminal, ten lines elsewhere."""
    text = f"step {number:3}/{STEPS}  loss {loss:.4f}  right {right:6.1%}"
    if sys.stdout.isatty():
        width = max(0, min(40, shutil.get_terminal_size().columns - len(text) - 5))
        done = width * number // STEPS
        end = "\n" if number == STEPS else ""
        print(f"\r[{'#' * done}{'.' * (width - done)}]  {text}\x1b[K", end=end, flush=True)
    elif number % (STEPS // 10) == 0:
        print(text, flush=True)


def run() -> int:
    """Run worker0's part; return the exit code."""
    losses = []
    began = time.perf_counter()
    for loss, right in train():
        losses.append(loss)
        show(len(losses), loss, right)
    seconds = time.perf_counter() - began
    print(f"{calls} calls in {seconds:.1f} s, {calls / seconds:.0f} a second.")
    fell = losses[-1] < losses[0] / 4
    print(f"The loss {'fell' if fell else 'DID NOT FALL'} from {losses[0]:.4f} to {losses[-1]:.4f}.")
    return 0 if fell else 1


# Starting and stopping.


def join(rank: int, meeting_point: str) -> None:
    torch.set_num_threads(1)
    # The stages call shutdown at once, and would say after five seconds that they wait for worker0: in the drawing.
    logging.getLogger("farprop").setLevel(logging.ERROR)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{meeting_point}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=WORLD_SIZE, rpc_backend_options=options)


def main() -> int:
    print("Starting four workers: one has the data and the loss, three have a stage of the model each.", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        at = f"{directory}/meeting-point"
        others = [mp.get_context("spawn").Process(target=serve, args=(rank, at)) for rank in range(1, WORLD_SIZE)]
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


if __name__ == "__main__":
    sys.exit(main())
