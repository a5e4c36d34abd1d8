"""MAML: a model on two workers that learns to learn from ten pictures: ``python examples/maml.py``

A task: tell five digits apart, which are called 0 to 4 in random order, after two pictures of each (scikit-learn's).
The inner loop adapts a copy of the parameters to these ten pictures, in two steps. The outer loop changes the
parameters so that adapted copies are good. So the outer gradient goes through the gradients of the inner loop, on every
worker: ``grad(..., create_graph=True)`` records its passes, and ``backward`` goes through them.

The layers are on the workers ``worker0`` and ``worker1``. Their parameters, copies and gradients never leave them.
"""

import argparse
import math
import sys

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import farprop
import farprop.autograd as dist_autograd
from farprop.optim import DistributedOptimizer
from farprop.rpc import RRef

SIZES = [[(64, 48), (48,), (48, 48), (48,)], [(48, 48), (48,), (48, 5), (5,)]]
TASKS, SHOWN, ASKED, INNER_STEPS, INNER_RATE, OUTER_RATE = 2, 2, 6, 2, 0.5, 0.01
TESTED, SHOW_EVERY = 400, 5


# On the workers that have layers


def layers(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return torch.tanh(x @ w1 + b1) @ w2 + b2


class Half:
    """Half of the layers."""

    def __init__(self, number: int) -> None:
        source = torch.Generator().manual_seed(number)
        self.parameters = [
            (torch.randn(size, generator=source, dtype=torch.float64) / math.sqrt(size[0])).requires_grad_()
            for size in SIZES[number]
        ]

    def references(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.parameters]

    def forward(self, x: Tensor, parameters: list[RRef[Tensor]]) -> Tensor:
        return layers(x, *[parameter.local_value() for parameter in parameters])

    def adapted(self, parameters: list[RRef[Tensor]], gradients: list[RRef[Tensor]]) -> list[RRef[Tensor]]:
        """Copies after a step of the inner loop. Their graphs lead to the parameters and to the gradients."""
        pairs = zip(parameters, gradients, strict=True)
        return [RRef(value.local_value() - INNER_RATE * gradient.local_value()) for value, gradient in pairs]


# On the driver


class Tasks:
    """Random tasks: pictures to adapt to, with what they are called, and others to be asked for."""

    def __init__(self, pictures: Tensor, digits: Tensor) -> None:
        self.of = [pictures[digits == digit] for digit in range(10)]
        self.source = torch.Generator().manual_seed(0)

    def draw(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pictures = []
        for digit in torch.randperm(10, generator=self.source)[:5]:
            order = torch.randperm(len(self.of[digit]), generator=self.source)
            pictures.append(self.of[digit][order])
        shown = torch.cat([some[:SHOWN] for some in pictures])
        asked = torch.cat([some[SHOWN : SHOWN + ASKED] for some in pictures])
        return shown, torch.arange(5).repeat_interleave(SHOWN), asked, torch.arange(5).repeat_interleave(ASKED)


def load() -> tuple[Tasks, Tasks]:
    """Tasks to train with, and tasks with other pictures."""
    found = load_digits()
    pictures, digits = torch.tensor(found.data) / 16, torch.tensor(found.target)
    return Tasks(pictures[TESTED:], digits[TESTED:]), Tasks(pictures[:TESTED], digits[:TESTED])


class Model:
    """The halves on both workers, and references to their parameters, or to copies of these."""

    def __init__(self, halves: list[RRef[Half]], parameters: list[list[RRef[Tensor]]]) -> None:
        self.halves, self.parameters = halves, parameters

    def scores(self, x: Tensor) -> Tensor:
        low, high = (half.rpc_sync() for half in self.halves)
        return high.forward(torch.tanh(low.forward(x, self.parameters[0])), self.parameters[1])

    def adapted(self, context: int, x: Tensor, y: Tensor) -> "Model":
        """One step of the inner loop: the same halves, with copies of the parameters that fit these pictures better."""
        loss = nn.functional.cross_entropy(self.scores(x), y)
        low, high = self.parameters
        gradients = dist_autograd.grad(context, loss, low + high, create_graph=True)
        given = [(low, gradients[: len(low)]), (high, gradients[len(low) :])]
        return Model(self.halves, [half.rpc_sync().adapted(*a) for half, a in zip(self.halves, given, strict=True)])

    def scores_after(self, context: int, x: Tensor, y: Tensor, new_x: Tensor) -> Tensor:
        """The inner loop on some pictures, and then the scores of others."""
        model = self
        for _ in range(INNER_STEPS):
            model = model.adapted(context, x, y)
        return model.scores(new_x)


def test(model: Model, tasks: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> float:
    right = []
    for x, y, new_x, new_y in tasks:
        with dist_autograd.context() as context:
            right.append((model.scores_after(context, x, y, new_x).argmax(1) == new_y).float().mean().item())
    return sum(right) / len(right)


def main(steps: int, test_tasks: int) -> None:
    training, testing = load()
    tests = [testing.draw() for _ in range(test_tasks)]
    with farprop.workers(2) as workers:
        halves = [worker.remote(Half, number) for number, worker in enumerate(workers)]
        model = Model(halves, [half.rpc_sync().references() for half in halves])
        optimizer = DistributedOptimizer(torch.optim.Adam, [*model.parameters[0], *model.parameters[1]], lr=OUTER_RATE)
        print(f"step   0                 right {test(model, tests):.1%} after seeing ten pictures", flush=True)
        losses = []
        for step in range(1, steps + 1):
            with dist_autograd.context() as context:
                loss = torch.zeros(())
                for x, y, new_x, new_y in [training.draw() for _ in range(TASKS)]:
                    scores = model.scores_after(context, x, y, new_x)
                    loss = loss + nn.functional.cross_entropy(scores, new_y) / TASKS
                dist_autograd.backward(context, [loss])
                optimizer.step(context)
            losses.append(loss.item())
            if step % SHOW_EVERY == 0:
                mean = sum(losses[-SHOW_EVERY:]) / SHOW_EVERY
                print(
                    f"step {step:3}  loss {mean:.8f}  right {test(model, tests):.1%} after seeing ten pictures",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="MAML: a model on two workers that learns to learn.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--test-tasks", type=int, default=8, help="that it is tested with now and then")
    try:
        main(**vars(parser.parse_args()))
    except KeyboardInterrupt:
        sys.exit(130)
