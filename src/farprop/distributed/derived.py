"""Collectives made of ``allreduce``, ``broadcast`` and ``allgather``. They move more than they would have to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from farprop.distributed.steps import Steps
from farprop.errors import UsageError


def reduce(steps: Steps, tensor: torch.Tensor, root: int, op: Any) -> None:
    total = tensor.clone(memory_format=torch.contiguous_format)
    steps.allreduce(total, op)
    if steps.rank == root:
        tensor.copy_(total)


def gather(steps: Steps, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
    came = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(steps.size)]
    steps.allgather(came, tensor)
    if steps.rank == root:
        for output, part in zip(outputs, came, strict=True):
            output.copy_(part)


def scatter(steps: Steps, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
    whole = output.new_empty((steps.size, *output.shape))
    if steps.rank == root:
        torch.stack(list(inputs), out=whole)
    steps.broadcast(whole, root)
    output.copy_(whole[steps.rank])


def reduce_scatter(steps: Steps, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any) -> None:
    whole = torch.stack(list(inputs))
    steps.allreduce(whole, op)
    output.copy_(whole[steps.rank])


def all_to_all(steps: Steps, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Everybody gets everything. Ranks may send different amounts, so they tell each other first."""
    counts = [torch.empty(steps.size, dtype=torch.int64) for _ in range(steps.size)]
    steps.allgather(counts, torch.tensor([tensor.numel() for tensor in inputs]))
    longest = max(int(row.sum()) for row in counts)
    mine = inputs[0].new_zeros(longest)
    own = torch.cat([tensor.reshape(-1) for tensor in inputs])
    mine[: own.numel()].copy_(own)
    everything = [torch.empty_like(mine) for _ in range(steps.size)]
    steps.allgather(everything, mine)
    for sender, output in enumerate(outputs):
        before, count = int(counts[sender][: steps.rank].sum()), int(counts[sender][steps.rank])
        if count != output.numel():
            raise UsageError(
                f"Rank {sender} sends {count} elements to rank {steps.rank}, which expects {output.numel()}."
            )
        output.copy_(everything[sender][before : before + count].view_as(output))
