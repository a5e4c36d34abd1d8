"""A transformer in a pipeline: three stages on three workers, 1F1B with micro-batches, and a trace of it.

It reads handwritten digits (of scikit-learn) as sequences of 8 rows of 8 pixels, and says which digit each is.
Activations and gradients go from stage to stage. The program itself sends batches and gets losses. At the end it
records three steps: open the trace in https://ui.perfetto.dev to see the stages at work, and the bubble between them.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import farprop
import farprop.autograd as dist_autograd
from farprop.optim import DistributedOptimizer

ROWS, PIXELS, DIGITS, WIDTH = 8, 8, 10, 32
BATCH, MICRO_BATCHES = 120, 8


def encoder_layers(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.0, batch_first=True) for _ in range(count)])


class First(nn.Module):
    """Rows of pixels become vectors, with their places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(PIXELS, WIDTH)
        self.places = nn.Parameter(torch.randn(ROWS, WIDTH) / 10)
        self.layers = encoder_layers(2)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.layers(self.embedding(pictures) + self.places)


class Last(nn.Module):
    """The mean of all rows says which digit it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = encoder_layers(2)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.layers(rows).mean(1))


def set_up(seed: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(seed)


def main(epochs: int, trace: str) -> None:
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    order = torch.randperm(len(labels))
    train, test = order[:1440], order[1440:]

    with farprop.workers(3) as workers:
        for seed, worker in enumerate(workers):
            worker.call(set_up, seed)
        first, middle, last = (worker.name for worker in workers)
        stages = [(first, First), (middle, lambda: encoder_layers(2)), (last, Last)]
        pipe = farprop.pipeline(stages, micro_batches=MICRO_BATCHES, schedule="1f1b")
        optimizer = DistributedOptimizer(torch.optim.Adam, pipe.parameters(), lr=2e-3)

        def step(batch: Tensor) -> float:
            with dist_autograd.context() as context_id:
                loss = pipe.step(pictures[batch], labels[batch], loss_fn=cross_entropy)
                optimizer.step(context_id)
            return loss.item()

        for epoch in range(epochs):
            batches = train[torch.randperm(len(train))].split(BATCH)
            losses = [step(batch) for batch in batches]
            print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}", flush=True)

        with farprop.profile(trace) as profile:
            for batch in train.split(BATCH)[:3]:
                step(batch)
        print(f"Three more steps are in {trace}:\n{profile.summary()}")

        right = (pipe.eval()(pictures[test]).argmax(1) == labels[test]).float().mean()
        print(f"{right:.1%} of {len(test)} pictures that it has not seen are classified correctly.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A transformer in a pipeline of three workers.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--trace", default="trace.json", help="where to write the trace")
    arguments = parser.parse_args()
    main(arguments.epochs, arguments.trace)
