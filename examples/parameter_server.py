"""A parameter server with asynchronous trainers: ``python examples/parameter_server.py``

The server (``worker0``) has the parameters of a small network that learns to read scikit-learn's pictures of digits.
Each trainer has a third of the pictures, and waits for no other: it fetches the parameters, computes a loss, and steps.
It fetches in an autograd context, so ``backward`` takes the gradients to the server, and ``step`` is taken there.

Trainers overtake each other all the time. ``consistency="versioned"`` makes that safe: a step waits for functions that
read the parameters, so nobody fetches half of a step; and steps run one after the other, so none is lost.
"""

import argparse
import itertools
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

import farprop
import farprop.autograd as dist_autograd
from farprop.optim import DistributedOptimizer
from farprop.rpc import RRef

TRAINERS, BATCH, RATE, TESTED = 3, 32, 0.2, 360


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def load() -> tuple[Tensor, Tensor]:
    """1,797 pictures in random order, and the digit that each shows."""
    found = load_digits()  # 8×8 pixels from 0 to 16
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]


class Server:
    """Has the parameters. Trainers call its methods, several at a time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = make_model()
        self.numbers = itertools.count()

    def references(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.model.parameters()]

    def fetch(self) -> tuple[int, dict[str, Tensor]]:
        """How many fetches were before this one, and copies of the parameters. Gradients go through the copies."""
        return next(self.numbers), {name: value.clone() for name, value in self.model.named_parameters()}


def train(seed: int, server: RRef[Server], pictures: Tensor, digits: Tensor, steps: int) -> int:
    """Run on each trainer. Returns during how many of its steps another trainer began one."""
    torch.manual_seed(seed)
    model = make_model()  # its own parameters are not used
    optimizer = DistributedOptimizer(torch.optim.SGD, server.rpc_sync().references(), lr=RATE, consistency="versioned")
    numbers, losses, began = [], [], time.perf_counter()
    for step in range(1, steps + 1):
        batch = torch.randint(len(pictures), (BATCH,))
        with dist_autograd.context() as context:
            number, parameters = server.rpc_sync().fetch()
            scores = functional_call(model, parameters, pictures[batch])
            loss = nn.functional.cross_entropy(scores, digits[batch])
            dist_autograd.backward(context, [loss])
            optimizer.step(context)
        numbers.append(number)
        losses.append(loss.item())
        if step % 25 == 0:
            seconds, mean = time.perf_counter() - began, sum(losses[-25:]) / 25
            print(f"step {step:3}  after {seconds:4.1f} s  loss {mean:.3f}", flush=True)
    return sum(following > number + 1 for number, following in itertools.pairwise(numbers))


def main(steps: int) -> None:
    (test_pictures, pictures), (test_digits, digits) = (data.tensor_split([TESTED]) for data in load())
    with farprop.workers(1 + TRAINERS) as workers:
        server = workers[0].remote(Server)
        shares = [(pictures[number::TRAINERS], digits[number::TRAINERS]) for number in range(TRAINERS)]
        trainings = [
            worker.call_async(train, number, server, *share, steps)
            for number, (worker, share) in enumerate(zip(workers[1:], shares, strict=True))
        ]
        overtaken = sum(training.wait() for training in trainings)
        total, parameters = server.rpc_sync().fetch()
    right = (functional_call(make_model(), parameters, test_pictures).argmax(1) == test_digits).float().mean().item()
    print(f"{total} steps of {TRAINERS} trainers; during {overtaken} of them another trainer began one.")
    print(f"{right:.1%} of {TESTED} pictures that nobody has trained on are classified correctly.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A parameter server with asynchronous trainers.")
    parser.add_argument("--steps", type=int, default=200, help="of each trainer")
    try:
        main(parser.parse_args().steps)
    except KeyboardInterrupt:
        sys.exit(130)
