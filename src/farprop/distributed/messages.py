"""Collectives made of ``send`` and ``recv``.

Sums are formed in an order that only depends on the number of ranks, and on one rank, so all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from farprop.distributed.reduction import Reduction
from farprop.distributed.steps import Steps
from farprop.errors import CollectiveError


def broadcast(steps: Steps, tensor: torch.Tensor, root: int) -> None:
    """Down a binomial tree."""
    place = (steps.rank - root) % steps.size
    bit = 1
    while bit < steps.size and not place & bit:
        bit <<= 1
    if place:
        steps.receive(tensor, (place - bit + root) % steps.size)
    while bit > 1:
        bit >>= 1
        if place + bit < steps.size:
            steps.send(tensor, (place + bit + root) % steps.size)


def reduce(steps: Steps, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
    """Up the same tree; the tensors of other ranks than the root stay as they are."""
    place = (steps.rank - root) % steps.size
    total = tensor.clone(memory_format=torch.contiguous_format)
    reduction.begin(total)
    came = torch.empty_like(total)
    bit = 1
    while bit < steps.size:
        if place & bit:
            steps.send(total, (place - bit + root) % steps.size)
            return
        if place + bit < steps.size:
            steps.receive(came, (place + bit + root) % steps.size)
            reduction.add(total, came)
        bit <<= 1
    reduction.end(total)
    tensor.copy_(total)


def allreduce(steps: Steps, tensor: torch.Tensor, reduction: Reduction) -> None:
    reduce(steps, tensor, 0, reduction)
    broadcast(steps, tensor, 0)


def all_to_all(steps: Steps, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """In each round every rank has one partner, and is that one's partner."""
    for number in range(steps.size):
        partner = (number - steps.rank) % steps.size
        if partner == steps.rank:
            outputs[partner].copy_(inputs[partner])
        else:
            steps.swap(inputs[partner], outputs[partner], partner)


def allgather(steps: Steps, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
    all_to_all(steps, outputs, [tensor] * steps.size)


def gather(steps: Steps, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, root: int) -> None:
    """``outputs`` is for the root alone."""
    if steps.rank != root:
        steps.send(tensor, root)
        return
    for rank, output in enumerate(outputs):
        if rank == root:
            output.copy_(tensor)
        else:
            steps.receive(output, rank)


def scatter(steps: Steps, output: torch.Tensor, inputs: Sequence[torch.Tensor], root: int) -> None:
    """``inputs`` is for the root alone."""
    if steps.rank != root:
        steps.receive(output, root)
        return
    for rank, tensor in enumerate(inputs):
        if rank == root:
            output.copy_(tensor)
        else:
            steps.send(tensor, rank)


def reduce_scatter(steps: Steps, output: torch.Tensor, inputs: Sequence[torch.Tensor], reduction: Reduction) -> None:
    parts = [torch.empty_like(output, memory_format=torch.contiguous_format) for _ in range(steps.size)]
    all_to_all(steps, parts, inputs)
    for part in parts:
        reduction.begin(part)
    for part in parts[1:]:
        reduction.add(parts[0], part)
    reduction.end(parts[0])
    output.copy_(parts[0])


def monitored_barrier(steps: Steps, wait_all_ranks: bool) -> None:
    """Rank 0 waits for the others, and knows who has not come. Errors have the words that Gloo's users look for."""
    if steps.rank != 0:
        steps.send(torch.zeros(1), 0)
        try:
            steps.receive(torch.zeros(1), 0)
        except CollectiveError as error:
            raise type(error)(
                f"Rank {steps.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {error}"
            ) from error
        return
    failures: dict[int, CollectiveError] = {}
    for rank in range(1, steps.size):
        try:
            steps.receive(torch.zeros(1), rank)
        except CollectiveError as error:
            failures[rank] = error
            if not wait_all_ranks:
                break
    if failures:
        first = failures[min(failures)]
        who = f"Rank{'s' if len(failures) > 1 else ''} {', '.join(map(str, failures))}"
        raise type(first)(f"{who} failed to pass monitoredBarrier. {first}") from first
    for rank in range(1, steps.size):
        steps.send(torch.zeros(1), rank)
