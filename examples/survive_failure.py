"""Training that goes on after a worker was killed, and ends as if nothing had happened.

A model is split over two workers, and a third worker is a spare one. Every ten steps the driver writes a checkpoint to
disk: weights, optimizer and the number of the step. In the middle of a step the example kills a worker with SIGKILL.
The driver gets ``ConnectionLostError``, lets the spare worker take the place of the dead one, puts the last checkpoint
into both halves of the model, and goes on from there.

The data are scikit-learn's pictures of digits. The example trains without a failure first, and compares the losses.
"""

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import farprop
import farprop.autograd as dist_autograd
import farprop.rpc as rpc
from farprop.errors import ConnectionLostError
from farprop.nn import RemoteModule
from farprop.optim import DistributedOptimizer

SAVE_EVERY, BATCH, TESTED = 10, 128, 360


def low() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh())


def high() -> nn.Module:
    torch.manual_seed(2)
    return nn.Linear(48, 10)


class Training:
    """The model on two workers with its optimizer, as the last checkpoint has them, or new ones."""

    def __init__(self, workers: list[str], checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.halves = [RemoteModule(worker, half) for worker, half in zip(workers, (low, high), strict=True)]
        weights = [weight for half in self.halves for weight in half.remote_parameters()]
        self.optimizer = DistributedOptimizer(torch.optim.SGD, weights, lr=0.05, momentum=0.9)
        self.steps = 0
        if checkpoint.exists():
            saved = torch.load(checkpoint)
            for half, state in zip(self.halves, saved["halves"], strict=True):
                half.get_module_rref().rpc_sync().load_state_dict(state)
            self.optimizer.load_state_dict(saved["optimizer"])
            self.steps = saved["steps"]

    def save(self) -> None:
        halves = [half.get_module_rref().rpc_sync().state_dict() for half in self.halves]
        state = {"halves": halves, "optimizer": self.optimizer.state_dict(), "steps": self.steps}
        torch.save(state, f"{self.checkpoint}.new")  # a crash in the middle must not leave half a checkpoint
        os.replace(f"{self.checkpoint}.new", self.checkpoint)

    def scores(self, pictures: Tensor) -> Tensor:
        return self.halves[1](self.halves[0](pictures))

    def step(self, pictures: Tensor, digits: Tensor, victim: int | None) -> float:
        """Take a step, and return its loss. In the middle of it, kill the process ``victim``."""
        # The batch depends on nothing but the number of the step: a step that is taken again is the same again.
        batch = torch.randint(len(pictures), (BATCH,), generator=torch.Generator().manual_seed(self.steps))
        with dist_autograd.context() as context_id:
            loss = nn.functional.cross_entropy(self.scores(pictures[batch]), digits[batch])
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
            dist_autograd.backward(context_id, [loss])
            self.optimizer.step(context_id)
        self.steps += 1
        return loss.item()


def train(
    workers: list[str], checkpoint: Path, pictures: Tensor, digits: Tensor, steps: int, kill_at: int | None = None
) -> list[float]:
    """Train on the first two of ``workers``; in step ``kill_at`` kill one of them. Return the loss of each step."""
    losses = [0.0] * steps
    while True:
        training = Training(workers[:2], checkpoint)
        try:
            for number in range(training.steps + 1, steps + 1):
                victim = None
                if number == kill_at:
                    victim, kill_at = rpc.rpc_sync(workers[1], os.getpid), None
                losses[number - 1] = training.step(pictures[TESTED:], digits[TESTED:], victim)
                if number % SAVE_EVERY == 0:
                    training.save()
                    print(f"step {number:3}  loss {losses[number - 1]:.4f}", flush=True)
            break
        except ConnectionLostError as error:
            if len(workers) < 3:
                raise  # no worker is left to spare
            print(f"step {number:3}  lost {error.worker}. {workers[2]} takes its place.", flush=True)
            workers = [workers[2] if worker == error.worker else worker for worker in workers[:2]]
    right = (training.scores(pictures[:TESTED]).argmax(1) == digits[:TESTED]).float().mean().item()
    print(f"{right:.1%} of {TESTED} pictures that it has not seen are classified correctly.", flush=True)
    return losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of each training (default: 100)")
    steps = parser.parse_args().steps
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    data = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    try:
        with tempfile.TemporaryDirectory() as directory, farprop.workers(3) as w:
            names = [worker.name for worker in w]
            print("Without a failure:", flush=True)
            expected = train(names, Path(directory, "first"), *data, steps)
            print("With a worker that is killed:", flush=True)
            losses = train(names, Path(directory, "second"), *data, steps, kill_at=steps // 2 + 5)
    except KeyboardInterrupt:
        print("Stopped.")
        return 130
    equal = losses == expected
    print(f"The losses of all {steps} steps are {'equal' if equal else 'NOT equal'}, to the last bit.")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
