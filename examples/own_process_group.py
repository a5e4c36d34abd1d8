"""Data-parallel training on a process group of one's own, which halves what goes over the network.

``CompressingGroup`` is a process group in Python: it reduces gradients in another dtype, on any other group, and counts
the bytes. Conversions start when a bucket of gradients is ready, and the backward pass goes on meanwhile. ``allgather``
and ``broadcast`` are passed on, and all other collectives follow from these three. ``DistributedDataParallel`` takes
the group as it takes any other.

Two workers train on scikit-learn's pictures of digits, each with its half of a batch: first with gradients in float32,
then in bfloat16, which has the range of float32 in half of its bits.
"""

import argparse
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import farprop
import farprop.distributed
from farprop.distributed import ProcessGroup, work_from_future
from farprop.nn.parallel import DistributedDataParallel

RANKS, BATCH, TESTED = 2, 128, 360


class CompressingGroup(ProcessGroup):
    """Reduces float32 tensors in a smaller dtype, on another group."""

    def __init__(self, inner: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(inner.rank(), inner.size())
        self.inner, self.dtype = inner, dtype
        self.reduced_bytes = 0

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        small = [tensor.to(self.dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors]
        self.reduced_bytes += sum(tensor.nbytes for tensor in small)

        def widen(reduced: Future[Any]) -> list[Tensor]:
            reduced.value()  # raises the error of the inner group, if there was one
            for tensor, values in zip(tensors, small, strict=True):
                tensor.copy_(values)
            return tensors

        return work_from_future(self.inner.allreduce(small, opts).get_future().then(widen))

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self.inner.broadcast(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        return self.inner.allgather(outputs, inputs, opts)


def train(rank: int, store: str, pictures: Tensor, digits: Tensor, steps: int, dtype: torch.dtype) -> str:
    """Train as one rank of the group, and return what rank 0 prints at the end. It runs on each worker."""
    dist.init_process_group("farprop", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group = CompressingGroup(dist.group.WORLD, dtype)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(layers, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    group.reduced_bytes = 0  # what the wrapper has exchanged to begin with does not count
    for number in range(1, steps + 1):
        batch = torch.randint(TESTED, len(pictures), (BATCH,)).chunk(RANKS)[rank]  # the same numbers on all ranks
        loss = nn.functional.cross_entropy(model(pictures[batch]), digits[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 20 == 0 and rank == 0:
            print(f"step {number:3}  loss {loss.item():.4f}", flush=True)
    with torch.no_grad():
        right = (model(pictures[:TESTED]).argmax(1) == digits[:TESTED]).float().mean().item()
    dist.destroy_process_group()
    return f"{group.reduced_bytes / max(1, steps) / 1000:.1f} kB a step, {right:.1%} of {TESTED} new pictures are right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="of each training (default: 100)")
    steps = parser.parse_args().steps
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    data = torch.tensor(found.data, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]
    try:
        with tempfile.TemporaryDirectory() as directory, farprop.workers(RANKS) as w:
            for dtype in (torch.float32, torch.bfloat16):
                store = f"{directory}/{dtype}"
                ranks = [worker.call_async(train, rank, store, *data, steps, dtype) for rank, worker in enumerate(w)]
                said, _ = torch.futures.wait_all(ranks)
                print(f"{dtype}: {said}", flush=True)
    except KeyboardInterrupt:
        print("Stopped.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
