"""Embeddings on parameter servers, dense layers trained data-parallel: ``python examples/embeddings.py``

Which module of Python's library is a line of code from? Each word of a line has a row in a table of 40,000. Say that
the table is too large for one worker: each of two servers has half of it, and adds up the rows that it is asked for.
Two trainers have the dense layers. Each trains on its own lines, and ``DistributedDataParallel`` averages gradients.

A backward pass goes through the dense layers and both servers, where it leaves sparse gradients: of the asked rows.
"""

import argparse
import importlib.util
import random
import re
import sys
import tempfile
import zlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

import farprop
import farprop.autograd as dist_autograd
from farprop.nn import RemoteModule
from farprop.nn.parallel import DistributedDataParallel
from farprop.optim import DistributedOptimizer
from farprop.rpc import RRef

SERVERS, TRAINERS, ROWS, WIDTH, WORDS = 2, 2, 40_000, 32, 16
BATCH, RATE, TESTED = 64, 0.05, 1000
MODULES = ["argparse", "_pydecimal", "mailbox", "pickletools", "pydoc", "smtplib", "tarfile", "threading", "typing"]


def load() -> tuple[list[str], Tensor]:
    """Lines of Python's own library in random order, none of them twice, and the number of each one's module."""
    modules = {}
    for number, name in enumerate(MODULES):
        text = importlib.util.find_spec(name).loader.get_source(name)
        modules |= {line.strip(): number for line in text.splitlines() if len(line.split()) > 2}
    lines = list(modules)
    random.Random(0).shuffle(lines)
    return lines, torch.tensor([modules[line] for line in lines])


def rows_of(line: str) -> list[int]:
    """The rows of a line's words in the table. Row 0 stands for no word."""
    rows = [1 + zlib.crc32(word.encode()) % (ROWS - 1) for word in re.findall(r"\w+|[^\w\s]", line)[:WORDS]]
    return rows + [0] * (WORDS - len(rows))


class Table(nn.EmbeddingBag):
    """What a server has: every second row. Its row 0 counts as nothing."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__(ROWS // SERVERS, WIDTH, mode="sum", sparse=True, padding_idx=0)
        nn.init.normal_(self.weight, std=0.1)
        # Adagrad makes sparse tensors, and torch warns if nobody has said whether they should be checked.
        torch.sparse.check_sparse_tensor_invariants.disable()


class Trainer:
    """The dense layers, and proxies of the tables on the servers."""

    def __init__(self, rank: int, meeting_point: str, tables: list[RemoteModule]) -> None:
        dist.init_process_group("farprop", init_method=f"file://{meeting_point}", rank=rank, world_size=TRAINERS)
        torch.manual_seed(rank)
        dense = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, len(MODULES)))
        self.tables, self.dense = tables, DistributedDataParallel(dense)  # which copies rank 0's weights to all ranks
        far = [parameter for table in tables for parameter in table.remote_parameters()]
        near = [RRef(parameter) for parameter in dense.parameters()]
        # Several trainers step the tables at once: "versioned" makes that safe.
        self.optimizer = DistributedOptimizer(torch.optim.Adagrad, far + near, lr=RATE, consistency="versioned")

    def scores(self, rows: Tensor) -> Tensor:
        """Both servers are asked at once. Row 7 of the whole table, say, is row 3 of the second server's."""
        parts = [
            table.forward_async(torch.where(rows % SERVERS == number, rows // SERVERS, 0))
            for number, table in enumerate(self.tables)
        ]
        return self.dense(sum(part.wait() for part in parts))

    def train(self, rows: Tensor, modules: Tensor, steps: int) -> float:
        """Train on this trainer's lines; returns the mean loss."""
        losses = []
        for _ in range(steps):
            batch = torch.randint(len(rows), (BATCH,))
            with dist_autograd.context() as context:
                loss = nn.functional.cross_entropy(self.scores(rows[batch]), modules[batch])
                dist_autograd.backward(context, [loss])
                self.optimizer.step(context)
            losses.append(loss.item())
        return sum(losses) / len(losses)

    @torch.no_grad()
    def guess(self, rows: Tensor) -> Tensor:
        return self.scores(rows).argmax(1)


def main(steps: int) -> None:
    lines, modules = load()
    rows = torch.tensor([rows_of(line) for line in lines])
    shares = [(rows[TESTED + rank :: TRAINERS], modules[TESTED + rank :: TRAINERS]) for rank in range(TRAINERS)]
    most = modules.bincount().max().item() / len(lines)
    print(
        f"{len(lines)} lines of {len(MODULES)} modules, {most:.0%} of them of one; {TESTED} are for the test.",
        flush=True,
    )
    with farprop.workers(SERVERS + TRAINERS) as workers, tempfile.TemporaryDirectory() as directory:
        tables = [RemoteModule(worker.name, Table, (seed,)) for seed, worker in enumerate(workers[:SERVERS])]
        trainers = [
            worker.remote(Trainer, rank, f"{directory}/meeting-point", tables)
            for rank, worker in enumerate(workers[SERVERS:])
        ]
        for done in range(0, steps, 20):
            todo = min(20, steps - done)
            trainings = [
                trainer.rpc_async().train(*share, todo) for trainer, share in zip(trainers, shares, strict=True)
            ]
            loss = sum(training.wait() for training in trainings) / TRAINERS
            guesses = trainers[0].rpc_sync().guess(rows[:TESTED])
            right = (guesses == modules[:TESTED]).float().mean().item()
            print(f"step {done + todo:3}  loss {loss:.3f}  right {right:5.1%}", flush=True)
        for line, guess, module in zip(lines[:5], guesses, modules, strict=False):
            verdict = "right" if guess == module else f"no, from {MODULES[module]}"
            print(f"{line[:70]:70}  {MODULES[guess]}? {verdict}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Embeddings on servers, with a data-parallel dense half.")
    parser.add_argument("--steps", type=int, default=200)
    try:
        main(parser.parse_args().steps)
    except KeyboardInterrupt:
        sys.exit(130)
